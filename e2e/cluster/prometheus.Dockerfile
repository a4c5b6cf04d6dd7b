# A Prometheus for the embedded cluster, where no registry can be reached. Debian's can't discover pods: this one is
# built from source (binaries.py), and its folder is the context.
ARG BASE_IMAGE
FROM ${BASE_IMAGE}
COPY prometheus /usr/local/bin/prometheus
USER 65532:65532
CMD ["prometheus"]
