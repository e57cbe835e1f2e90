"""Written by tools/fingerprint.py: by release and module, the digest of its file and of each target in it."""

FINGERPRINTS: dict[str, dict[str, dict[str, str]]] = {
    "2.13.0": {
        "torch.distributed.device_mesh": {
            "file": "acccb6b20491160b1d0aa7f0445fd3fd",
        },
        "torch.distributed.tensor._redistribute": {
            "file": "39ee270d5c24b77b81217daad22d9376",
        },
    },
    "2.14.1": {
        "torch.distributed.device_mesh": {
            "file": "673bca57b78b606d5d4a30e7e0b1cc8e",
        },
        "torch.distributed.tensor._redistribute": {
            "file": "4027e2ccf1fc7ef27a599657122e5306",
        },
    },
    "2.15.0": {
        "torch.distributed.device_mesh": {
            "file": "8ebcd19b62f08659679acd826a81471c",
        },
        "torch.distributed.tensor._redistribute": {
            "file": "4027e2ccf1fc7ef27a599657122e5306",
        },
    },
}
