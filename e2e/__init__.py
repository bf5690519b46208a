"""A real Kubernetes to try tapforge on. Nothing here is shipped; it runs from a checkout, on Linux."""
