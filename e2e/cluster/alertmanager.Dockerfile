# An Alertmanager for the embedded cluster, where no registry can be reached: Debian's own, on the base of the other
# images, by the name that the official image has for it.
ARG BASE_IMAGE
FROM ${BASE_IMAGE}
RUN apt-get update && apt-get install --yes --no-install-recommends prometheus-alertmanager \
    && rm -rf /var/lib/apt/lists/* && ln -s /usr/bin/prometheus-alertmanager /usr/local/bin/alertmanager
USER 65532:65532
CMD ["alertmanager"]
