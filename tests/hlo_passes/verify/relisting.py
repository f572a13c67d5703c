"""Modules of protos whose operands a test has changed."""

from hlo_passes.ir import Module
from hlo_passes.normalize.post_order import in_post_order
from hlo_passes.proto import hlo_pb2


def relisted(proto: hlo_pb2.HloModuleProto) -> Module:
    """Lists what instructions read in front of them; their schedule stays."""
    for computation in proto.computations:
        place = {i.id: n for n, i in enumerate(in_post_order(computation.instructions))}
        computation.instructions.sort(key=lambda i, place=place: place[i.id])
    return Module(proto)
