# A Redis for the embedded cluster, where no registry can be reached: Debian's own, on the base of the other images.
ARG BASE_IMAGE
FROM ${BASE_IMAGE}
RUN apt-get update && apt-get install --yes --no-install-recommends redis-server && rm -rf /var/lib/apt/lists/*
USER 65532:65532
CMD ["redis-server"]
