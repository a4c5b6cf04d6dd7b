"""The keys of one control plane: a CA, one certificate for its servers, and the service accounts' signing key."""

from pathlib import Path

from processes import run

VALID_DAYS = "3650"


class Keys:
    """PEM files in `folder`; made once and kept, so that a restarted control plane stays the same one.

    The one certificate serves etcd and kube-apiserver, and is what kube-apiserver shows to etcd and kubelet.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca = folder / "ca.crt"
        self.certificate = folder / "control-plane.crt"
        self.key = folder / "control-plane.key"
        self.service_accounts = folder / "service-accounts.key"
        self.service_accounts_public = folder / "service-accounts.pub"

    def ensure(self, ip_addresses: list[str]) -> None:
        """Make what is missing; `ip_addresses` are those that the servers are reached by."""
        if self.certificate.exists():
            return
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        ca_key, request, extensions = (self.folder / name for name in ("ca.key", "request.csr", "extensions"))
        for key in (ca_key, self.key, self.service_accounts):
            run("openssl", "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", key)
            key.chmod(0o600)
        run("openssl", "pkey", "-in", self.service_accounts, "-pubout", "-out", self.service_accounts_public)
        run(
            *("openssl", "req", "-x509", "-new", "-key", ca_key, "-days", VALID_DAYS, "-out", self.ca),
            *("-subj", "/CN=sixfold-test-ca"),
        )
        names = ["localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"]
        names.append("kubernetes.default.svc.cluster.local")
        alternatives = [f"DNS:{name}" for name in names] + [f"IP:{address}" for address in ip_addresses]
        extensions.write_text(
            f"subjectAltName={','.join(alternatives)}\nextendedKeyUsage=serverAuth,clientAuth\n"
            "keyUsage=critical,digitalSignature\n"
        )
        run(
            *("openssl", "req", "-new", "-key", self.key, "-out", request),
            *("-subj", "/O=system:masters/CN=kube-apiserver"),
        )
        partial = self.certificate.with_suffix(".partial")
        run(
            *("openssl", "x509", "-req", "-in", request, "-CA", self.ca, "-CAkey", ca_key, "-CAcreateserial"),
            *("-days", VALID_DAYS, "-extfile", extensions, "-out", partial),
        )
        partial.rename(self.certificate)
