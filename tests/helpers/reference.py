"""The equations of the layer, sample by sample and pixel set by pixel set, in plain float64.

Written for reading, not for speed, and independent of the package: no code is shared.
"""

import torch

SETS = ("bw", "iw", "bn", "in", "ln")


def inverse_sqrt(cov, whitening, num_iterations):
    """Σ^(-1/2) of one (G, G) matrix, by the formulas as they are printed."""
    if whitening == "eigh":
        values, vectors = torch.linalg.eigh(cov)
        return vectors @ torch.diag(values**-0.5) @ vectors.T
    trace = cov.trace()
    normalized = cov / trace
    p = torch.eye(len(cov), dtype=cov.dtype)
    for _ in range(num_iterations):
        p = 0.5 * (3 * p - p @ p @ p @ normalized)
    return p / trace**0.5


def covariance(pixels):
    """Mean (G,) and biased covariance (G, G) of pixels (G, number)."""
    mean = pixels.mean(dim=1)
    centred = pixels - mean[:, None]
    return mean, centred @ centred.T / pixels.shape[1]


def switch_whiten(
    samples,
    weight,
    bias,
    mean_weight,
    var_weight,
    statistics,
    group_size,
    whitening="newton",
    num_iterations=5,
    eps=1e-5,
    running=None,
):
    """Whiten a list of samples (C, H_i, W_i), which may differ in size.

    `running` = (mean (g, G), covariance (g, G, G)) takes the batch's place, as in evaluation.
    Returns the outputs, and the batch's mean and covariance of each group.
    """
    omega = torch.softmax(mean_weight, 0)
    omega_cov = omega if var_weight is None else torch.softmax(var_weight, 0)
    channels = samples[0].shape[0]
    flat = [s.reshape(channels, -1) for s in samples]
    outputs = [[] for _ in samples]
    batch = []
    for j in range(channels // group_size):
        rows = slice(j * group_size, (j + 1) * group_size)
        batch_mean, batch_cov = covariance(torch.cat([f[rows] for f in flat], dim=1))
        batch.append((batch_mean, batch_cov))
        if running is not None:
            batch_mean, batch_cov = running[0][j], running[1][j]
        for n, pixels in enumerate(flat):
            mean, cov = covariance(pixels[rows])
            layer_var = pixels.var(correction=0)
            eye = torch.eye(group_size, dtype=cov.dtype)
            means = {
                "bw": batch_mean,
                "iw": mean,
                "bn": batch_mean,
                "in": mean,
                "ln": pixels.mean() * torch.ones_like(mean),
            }
            covs = {
                "bw": batch_cov,
                "iw": cov,
                "bn": torch.diag(torch.diag(batch_cov)),
                "in": torch.diag(torch.diag(cov)),
                "ln": layer_var * eye,
            }
            mu = sum(omega[k] * means[name] for k, name in enumerate(statistics))
            sigma = sum(omega_cov[k] * covs[name] for k, name in enumerate(statistics))
            sigma = sigma + eps * eye
            if "bw" in statistics or "iw" in statistics:
                root = inverse_sqrt(sigma, whitening, num_iterations)
            else:
                root = torch.diag(torch.diag(sigma) ** -0.5)
            y = root @ (pixels[rows] - mu[:, None])
            if weight is not None:
                y = weight[rows, None] * y + bias[rows, None]
            outputs[n].append(y)
    outputs = [torch.cat(y).reshape(s.shape) for y, s in zip(outputs, samples)]
    return outputs, torch.stack([m for m, _ in batch]), torch.stack([c for _, c in batch])
