"""Write a Cloud Optimized GeoTIFF block by block, in any order, from many processes.

`CogSpec` says what the file is to be, `encode_chunk` makes its tiles from pixels, anywhere, and
`WorkFile` is what they are appended to, and what becomes the file.
"""

from daskinfer.cog.encode import EncodedChunk, encode_chunk
from daskinfer.cog.spec import CogSpec
from daskinfer.cog.workfile import WorkFile

__all__ = ["CogSpec", "EncodedChunk", "WorkFile", "encode_chunk"]
