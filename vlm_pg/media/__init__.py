"""From a media reference to the pixels the vision tower sees: paths, sampling, decoding in killable workers.

with MediaLoader(MediaSettings(), root=Path("data")) as loader:
    ticket = loader.submit(sample.media)      # decoding starts in the background
    media = ticket.result()                   # one DecodedMedia or SampleError per reference
"""
