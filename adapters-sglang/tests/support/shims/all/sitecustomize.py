"""Without CUDA torchvision's compiled part does not load: declare the operators that its Python part names.

Done when torchvision is first looked for, so that processes which don't want it import no torch.
"""

import sys

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class _BeforeTorchvision:
    kept = None

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision" and self.kept is None:
            import torch

            type(self).kept = library = torch.library.Library("torchvision", "DEF")
            for schema in _SCHEMAS:
                library.define(schema)


sys.meta_path.insert(0, _BeforeTorchvision())
