"""What Tessera promises, checked on a real GPU. See tests/gpu/README.md."""
