"""ONNX Runtime's two attention operators: Attention of opset 23, which it runs as products and a
softmax, and its own MultiHeadAttention, which it runs fused. A row is compared with the faster."""
import numpy
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper


def session(node, shape, opsets, threads):
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "qkv"]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)
    graph = helper.make_graph([node], "attention", inputs, [output])
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # Threads spin while a call runs, and sleep when it is over.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return onnxruntime.InferenceSession(model.SerializeToString(), options,
                                        providers=["CPUExecutionProvider"])


class Operator:
    """One operator on bound inputs and output; run() computes, result() is [B,H,N,D]."""

    def __init__(self, made, arrays, back):
        self.session, self.back = made, back
        self.binding = made.io_binding()
        self.values = [onnxruntime.OrtValue.ortvalue_from_numpy(a) for a in arrays]
        for name, value in zip("qkv", self.values):
            self.binding.bind_ortvalue_input(name, value)
        self.output = onnxruntime.OrtValue.ortvalue_from_numpy(numpy.zeros_like(arrays[0]))
        self.binding.bind_ortvalue_output("y", self.output)

    def run(self):
        self.session.run_with_iobinding(self.binding)

    def result(self):
        return torch.from_numpy(self.back(self.output.numpy()))


def operators(case, threads):
    """{name: Operator} of a row without masks, each fed in the layout it wants."""
    b, h, _, n, _, d, _ = case.shape
    heads = [t.numpy() for t in (case.q, case.k, case.v)]
    # MultiHeadAttention wants heads beside each other: [B, N, H·D].
    rows = [numpy.ascontiguousarray(a.transpose(0, 2, 1, 3)).reshape(b, n, h * d) for a in heads]
    standard = session(helper.make_node("Attention", list("qkv"), ["y"]), [b, h, n, d],
                       [helper.make_opsetid("", 23)], threads)
    own = session(helper.make_node("MultiHeadAttention", list("qkv"), ["y"],
                                   domain="com.microsoft", num_heads=h), [b, n, h * d],
                  [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)], threads)
    return {
        "Attention": Operator(standard, heads, lambda y: y),
        "MultiHeadAttention": Operator(
            own, rows,
            lambda y: numpy.ascontiguousarray(y.reshape(b, n, h, d).transpose(0, 2, 1, 3)))}


VERSIONS = {"ONNX Runtime": onnxruntime.__version__, "onnx": onnx.__version__}
