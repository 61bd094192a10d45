"""Second launch of a backward pass: through the transform of each sample and group."""

from ..options import Options
from .common import (
    OF_USERS,
    Map,
    identity_matrix,
    load_matrix,
    load_vector,
    store_matrix,
    store_vector,
    sum_matrix,
    tl,
    triton,
)
from .launch import Launch
from .mixture import LAST, LOADS, SLOTS, inner_products, mix, omegas, place, positions
from .newton import newton, newton_backward


@triton.jit(do_not_specialize=["parts", "groups"], do_not_specialize_on_alignment=OF_USERS)
def _whiten_backward_kernel(
    product_ptr,  # (N', g, parts, G, G)
    total_ptr,  # (N', g, parts, G)
    mean_weight_ptr,  # (K,)
    var_weight_ptr,  # (K,), None if tied
    weight_ptr,  # (C,), None if there is no γ and β
    mean_ptr,  # (N, g, G), None if nothing depends on the sample
    cov_ptr,  # (N, g, G, G), likewise
    batch_mean_ptr,  # (g, G), None if nothing depends on the batch
    batch_cov_ptr,  # (g, G, G), likewise
    layer_ptr,  # (N, 2), None without "ln"
    matrix_ptr,  # (N', g, G, G)
    grad_weight_ptr,  # (N', g, G)
    grad_bias_ptr,  # (N', g, G)
    grad_center_ptr,  # (N', g, G)
    grad_mixed_ptr,  # (N', g, G, G)
    inner_ptr,  # (N', g, 2, SLOTS)
    iterates_ptr,  # (N', g, T - 1, 2, GP, GP), scratch
    parts,
    groups,
    eps,
    T: tl.constexpr,
    K: tl.constexpr,
    BW: tl.constexpr,
    IW: tl.constexpr,
    BN: tl.constexpr,
    IN: tl.constexpr,
    LN: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
):
    """One sample and group in each program. Σ̂ and its root are not kept, but computed again."""
    index = tl.program_id(0).to(tl.int64)
    sample = index // groups
    group = index % groups

    grad_root = tl.zeros((GP, GP), dtype=tl.float32)
    total = tl.zeros((GP,), dtype=tl.float32)
    i = tl.arange(0, GP)
    for first in range(0, parts, LOADS):
        for j in tl.static_range(LOADS):
            part = index * parts + first + j
            there = first + j < parts
            grad_root += load_matrix(product_ptr + part * G * G, G, GP, there)
            total += load_vector(total_ptr + part * G, G, GP, there)

    mean = None
    cov = None
    batch_mean = None
    batch_cov = None
    layer_mean = 0.0
    layer_variance = 0.0
    if batch_mean_ptr is not None:
        batch_mean = load_vector(batch_mean_ptr + group * G, G, GP)
        batch_cov = load_matrix(batch_cov_ptr + group * G * G, G, GP)
    if mean_ptr is not None:
        mean = load_vector(mean_ptr + index * G, G, GP)
        cov = load_matrix(cov_ptr + index * G * G, G, GP)
    if layer_ptr is not None:
        layer_mean = tl.load(layer_ptr + 2 * sample)
        layer_variance = tl.load(layer_ptr + 2 * sample + 1)
    omega, omega_cov = omegas(mean_weight_ptr, var_weight_ptr, K)
    _, mixed = mix(
        omega,
        omega_cov,
        mean,
        cov,
        batch_mean,
        batch_cov,
        layer_mean,
        layer_variance,
        eps,
        BW,
        IW,
        BN,
        IN,
        LN,
        G,
        GP,
    )
    identity = identity_matrix(G, GP)
    trace = sum_matrix(mixed * identity)
    normalized = mixed / trace
    iterates = iterates_ptr + index * ((T - 1) * 2 * GP * GP) + i[:, None] * GP + i[None, :]
    p = newton(normalized, identity, iterates, T, GP * GP)
    # A thread reads below what other threads of the program have written.
    tl.debug_barrier()

    # Through A = γ ⊙ P_T / sqrt(tr Σ̂) and y = A (x - μ̂) + β.
    scale = 1.0 / tl.sqrt(trace)
    matrix = p * scale
    store_vector(grad_bias_ptr + index * G, total, G, GP)
    if weight_ptr is not None:
        store_vector(grad_weight_ptr + index * G, tl.sum(grad_root * matrix, axis=1), G, GP)
        gamma = load_vector(weight_ptr + group * G, G, GP)[:, None]
        matrix *= gamma
        grad_root *= gamma
    store_matrix(matrix_ptr + index * G * G, matrix, G, GP)
    grad_center = -tl.sum(matrix * total[:, None], axis=0)

    # Through S = Σ̂ / tr Σ̂.
    root_product = sum_matrix(grad_root * p)
    grad = newton_backward(normalized, identity, iterates, grad_root * scale, T, GP * GP)
    grad_trace = -(0.5 * scale * root_product + sum_matrix(grad * normalized)) / trace
    grad_mixed = 0.5 * (grad + tl.trans(grad)) / trace + grad_trace * identity
    store_vector(grad_center_ptr + index * G, grad_center, G, GP)
    store_matrix(grad_mixed_ptr + index * G * G, grad_mixed, G, GP)

    # Through the mixture, to its ratios.
    of_mean = tl.zeros((SLOTS,), dtype=tl.float32)
    of_cov = tl.zeros((SLOTS,), dtype=tl.float32)
    if batch_mean_ptr is not None:
        more_mean, more_cov = inner_products(
            grad_center, grad_mixed, batch_mean, batch_cov, identity, BW, BN
        )
        of_mean += more_mean
        of_cov += more_cov
    if mean_ptr is not None:
        more_mean, more_cov = inner_products(grad_center, grad_mixed, mean, cov, identity, IW, IN)
        of_mean += more_mean
        of_cov += more_cov
    if layer_ptr is not None:
        center_sum = tl.sum(grad_center, axis=0)
        diagonal_sum = sum_matrix(grad_mixed * identity)
        of_mean += place(center_sum * layer_mean, LN) + place(center_sum, LAST)
        of_cov += place(diagonal_sum * layer_variance, LN) + place(diagonal_sum, LAST)
    slot = tl.arange(0, SLOTS)
    tl.store(inner_ptr + 2 * index * SLOTS + slot, of_mean)
    tl.store(inner_ptr + (2 * index + 1) * SLOTS + slot, of_cov)


def whiten_backward(map: Map, matrices: int, parts: int, options: Options) -> Launch:
    """Through the transforms of so many samples and groups, N' g, of a sum in parts each."""
    return Launch(
        _whiten_backward_kernel,
        matrices,
        parts,
        map.groups,
        float(options.eps),
        T=options.num_iterations,
        **positions(options.statistics),
        **map.matrix,
    )
