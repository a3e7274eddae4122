"""The models of `models.py` in PyTorch, layer by layer, for the comparison with its autocast."""

import torch
from torch import nn
from torch.nn import functional


class Transformer(nn.Module):
    """Causal, normalized first."""

    def __init__(self, blocks: int, width: int, heads: int, words: int, length: int):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).flatten(0, 1)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        batch, length, width = x.shape
        projected = self.project(self.norms[0](x))
        split = projected.view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norms[1](x))


class ResNet50(nn.Module):
    """As Keras has it: convolutions with a bias, strides in the first of a block."""

    def __init__(self):
        super().__init__()
        stem = [nn.Conv2d(3, 64, 7, 2, 3), _norm(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        body, channels = [], 64
        for filters, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for i in range(blocks):
                body.append(_Bottleneck(channels, filters, stride if i == 0 else 1, i == 0))
                channels = 4 * filters
        self.features = nn.Sequential(*stem, *body)
        self.head = nn.Linear(channels, 1000)

    def forward(self, x):
        return self.head(self.features(x).mean((2, 3)))


def _norm(channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels, eps=1.001e-5, momentum=0.01)


class _Bottleneck(nn.Module):
    def __init__(self, channels: int, filters: int, stride: int, project: bool):
        super().__init__()
        self.branch = nn.Sequential(
            *(nn.Conv2d(channels, filters, 1, stride), _norm(filters), nn.ReLU()),
            *(nn.Conv2d(filters, filters, 3, padding=1), _norm(filters), nn.ReLU()),
            *(nn.Conv2d(filters, 4 * filters, 1), _norm(4 * filters)),
        )
        shortcut = (nn.Conv2d(channels, 4 * filters, 1, stride), _norm(4 * filters))
        self.shortcut = nn.Sequential(*shortcut if project else ())

    def forward(self, x):
        return functional.relu(self.shortcut(x) + self.branch(x))


MODELS = {
    "transformer": lambda: Transformer(4, 128, 4, 2_000, 64),
    "large_transformer": lambda: Transformer(12, 768, 12, 20_000, 512),
    "resnet50": ResNet50,
}


def num_parameters(model: nn.Module) -> int:
    """Numbers that are trained."""
    return sum(p.numel() for p in model.parameters())


def on_device(model: nn.Module, x, y, device: str):
    """The model and its batch there; images and kernels with their channels last, as in Keras."""
    x = torch.as_tensor(x, device=device)
    if x.ndim == 4:
        x = x.permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)
        model = model.to(memory_format=torch.channels_last)
    return model.to(device), x, torch.as_tensor(y, device=device).long().flatten()
