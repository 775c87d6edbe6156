"""The Kubernetes manifests of the site are valid, by the schema of Kubernetes: nox -s manifests."""

from pathlib import Path

import pytest
import yaml
from pages import blocks_of

kubernetes_validate = pytest.importorskip("kubernetes_validate")

PAGE = Path(__file__).parents[2] / "docs/how-to/launch-with-kubernetes.md"
MANIFESTS = [
    pytest.param(document, id=f"{document['kind']}-{document['metadata']['name']}")
    for block in blocks_of(PAGE.read_text(encoding="utf8"))
    if block.language == "yaml"
    for document in yaml.safe_load_all(block.text)
]


@pytest.mark.parametrize("version", ["1.29", "1.34"])
@pytest.mark.parametrize("manifest", MANIFESTS)
def test_manifest_matches_the_schema(manifest, version):
    kubernetes_validate.validate(manifest, version, strict=True)


def test_page_has_a_job_and_a_deployment():
    assert {"Job", "Deployment"} <= {manifest.values[0]["kind"] for manifest in MANIFESTS}
