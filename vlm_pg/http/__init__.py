"""Requests to servers of language models: asked again where that helps, bounded, stopped on request, keys unseen."""
