"""torch.func, gradients of gradients and forward mode: right, or refused in one line."""

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

from torch.autograd import forward_ad  # noqa: E402
from torch.autograd.functional import hessian, jacobian  # noqa: E402

import foci.torch  # noqa: E402

torch.manual_seed(0)
Q, K, V = torch.randn(3, 1, 2, 5, 4)
NO_SECOND = "no gradients of gradients"


def ours(q):
    return foci.torch.attention(q, K, V)


def formula(q):
    return torch.softmax(q.double() @ K.double().mT / 2, -1) @ V.double()


def square(f):
    return lambda q: f(q).square().sum()


def near(got, want):
    torch.testing.assert_close(got.double(), want.double(), rtol=2e-5, atol=2e-6)


def test_reverse_mode_of_torch_func():
    func = torch.func
    near(func.grad(square(ours))(Q), func.grad(square(formula))(Q))
    near(func.jacrev(ours)(Q), func.jacrev(formula)(Q))
    near(func.vmap(ours)(torch.stack([Q, 2 * Q]))[1], formula(2 * Q))
    near(func.vmap(func.grad(square(ours)))(torch.stack([Q, 2 * Q]))[1],
         func.grad(square(formula))(2 * Q))
    near(func.vmap(lambda k, v: foci.torch.attention(Q, k, v), in_dims=(0, None))(
        torch.stack([K, -K]), V)[1], torch.softmax(-Q @ K.mT / 2, -1) @ V)


def test_statistics_and_weights_under_torch_func():
    def entropy(q):
        return foci.torch.attention(q, K, V, normalizer="entmax", statistics="entropy")

    leaf = Q.clone().requires_grad_()
    entropy(leaf).entropy.sum().backward()
    assert torch.equal(torch.func.grad(lambda q: entropy(q).entropy.sum())(Q), leaf.grad)
    leaf.grad = None
    entropy(leaf).weights(rows=[1]).square().sum().backward()
    assert torch.equal(
        torch.func.grad(lambda q: entropy(q).weights(rows=[1]).square().sum())(Q), leaf.grad)


def test_row_maps_under_torch_func():
    scores = torch.randn(3, 6)
    assert torch.equal(torch.func.jacrev(foci.torch.entmax)(scores),
                       jacobian(foci.torch.entmax, scores))
    assert torch.equal(torch.func.vmap(foci.torch.sparsemax)(scores), foci.torch.sparsemax(scores))


def test_modules_under_functional_call():
    m = foci.torch.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 4, 8)
    m(x, x, x)[0].square().sum().backward()
    got = torch.func.grad(lambda p: torch.func.functional_call(m, p, (x, x, x))[0].square().sum())(
        {name: p.detach() for name, p in m.named_parameters()})
    for name, p in m.named_parameters():
        near(got[name], p.grad)


def test_gradients_that_come_many_at_once():
    near(jacobian(ours, Q, vectorize=True), jacobian(formula, Q))
    scores = torch.randn(3, 6)
    assert torch.equal(jacobian(foci.torch.entmax, scores, vectorize=True),
                       jacobian(foci.torch.entmax, scores))


def penalty_of(y, x):
    gradient, = torch.autograd.grad(y, x, create_graph=True)
    gradient.square().sum().backward()


def test_gradients_of_gradients_are_refused():
    def outputs(x):
        return foci.torch.attention(x, K, V, statistics="entropy")

    calls = [lambda: hessian(square(ours), Q),
             lambda: hessian(square(foci.torch.entmax), torch.randn(3, 6)),
             lambda: torch.func.grad(square(torch.func.grad(square(ours))))(Q)]
    for f in (lambda x: ours(x).sum(), lambda x: outputs(x).entropy.sum(),
              lambda x: outputs(x).weights().square().sum(),
              lambda x: foci.torch.sparsemax(x).square().sum(),
              lambda x: torch.ops.foci.normalize(
                  x, foci.Spec(normalizer="sparsemax").to_json()).square().sum()):
        x = Q.clone().requires_grad_()
        calls.append(lambda f=f, x=x: penalty_of(f(x), x))
    for call in calls:
        with pytest.raises(NotImplementedError, match=NO_SECOND):
            call()


def test_a_graph_that_nobody_differentiates_again_is_none_the_worse():
    x = Q.clone().requires_grad_()
    plain, = torch.autograd.grad(square(ours)(x), x)
    kept, = torch.autograd.grad(square(ours)(x), x, create_graph=True)
    assert torch.equal(plain, kept) and kept.requires_grad and not plain.requires_grad


def test_forward_mode_is_refused():
    ones = torch.ones_like(Q)
    scores = torch.randn(3, 6)

    def dual(f, x):
        with forward_ad.dual_level():
            f(forward_ad.make_dual(x, torch.ones_like(x)))

    for call in (lambda: torch.func.jvp(ours, (Q,), (ones,)), lambda: torch.func.jacfwd(ours)(Q),
                 lambda: dual(ours, Q), lambda: dual(foci.torch.entmax, scores),
                 lambda: torch.func.jvp(foci.torch.sparsemax, (scores,), (scores,))):
        with pytest.raises(NotImplementedError, match="no forward-mode derivatives"):
            call()
    with forward_ad.dual_level():  # nothing dual about these
        assert torch.equal(ours(Q), ours(Q))
