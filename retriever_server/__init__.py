"""The retrieval service: a process of its own that shares only its HTTP schema with search_r1."""
