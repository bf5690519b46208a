"""Folders in object storage, and what its errors mean."""
