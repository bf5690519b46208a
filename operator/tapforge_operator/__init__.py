"""The control plane of tapforge: pools of phones that heal themselves, claims that hold."""
