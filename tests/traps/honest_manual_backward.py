"""The closed-form backward: the bias's gradient exactly zero in training, two column reductions in all."""

import torch
import torch.nn as nn


class Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, scale, gamma, beta, mean, var, eps, training):
        a = x @ weight.t()
        if training:
            offset = a.mean(0)
            a.sub_(offset)
            rest = a.mean(0)
            variance = a.square().mean(0) - rest.square()
            mean.copy_(scale * (offset + rest + bias))
            var.copy_(scale * scale * variance)
            r = torch.rsqrt(scale * scale * variance + eps)
            centre = rest
            y = gamma * scale * r * (a - rest) + beta
        else:
            r = torch.rsqrt(var + eps)
            centre = mean
            y = gamma * r * (scale * a + (scale * bias - mean)) + beta
        ctx.save_for_backward(x, weight, a, bias, scale, gamma, centre, r)
        ctx.eps, ctx.training = eps, training
        return y

    @staticmethod
    def backward(ctx, g):
        x, weight, a, bias, s, gamma, centre, r = ctx.saved_tensors
        rows = x.shape[0]
        beta_grad = g.sum(0)
        alpha = gamma * s * r
        if ctx.training:
            centred = a - centre
            h = (g * centred).sum(0)
            da = alpha * (g - beta_grad / rows - centred * (s * s * r * r * h / rows))
            bias_grad, gamma_grad = torch.zeros_like(bias), s * r * h
            scale_grad = gamma * ctx.eps * r**3 * h
        else:
            da = alpha * g
            bias_grad = da.sum(0)
            gamma_grad = (g * (r * (s * a + (s * bias - centre)))).sum(0)
            scale_grad = gamma * r * (g * (a + bias)).sum(0)
        return da @ weight, da.t() @ x, bias_grad, scale_grad, gamma_grad, beta_grad, None, None, None, None


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)

    def update(self, mean, var, rows):
        bn, m = self.bn, self.bn.momentum
        with torch.no_grad():
            bn.num_batches_tracked += 1
            bn.running_mean.mul_(1 - m).add_(m * mean)
            bn.running_var.mul_(1 - m).add_(m * var * rows / (rows - 1))

    def forward(self, x):
        if self.training and x.shape[0] < 2:
            raise ValueError("Expected more than 1 value per channel when training")
        bn = self.bn
        mean, var = (bn.running_mean, bn.running_var) if not self.training else torch.empty(2, bn.num_features)
        y = Fused.apply(
            x, self.gemm.weight, self.gemm.bias, self.scale, bn.weight, bn.bias, mean, var, bn.eps, self.training
        )
        if self.training:
            self.update(mean, var, x.shape[0])
        return y
