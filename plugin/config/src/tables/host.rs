//! `[paths]`, `[pages]`, `[ledger]`, `[kubernetes]`, `[metrics]`, `[labels]` and `[log]`: the plugin's own.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::json;

use crate::form::{boolean, bytes, optional_path, parsed, path, time, word};
use crate::table::table;
use crate::{Events, LogFormat, MIB, TmpfsPolicy, listen, log_filter};

table! {
    /// Files, directories and sockets on the host.
    pub struct Paths {
        /// Kubelet's device-plugin directory.
        kubelet: PathBuf = "/var/lib/kubelet/device-plugins".into(), path(), Restart;
        /// Kubelet's PodResources socket.
        pod_resources: PathBuf = "/var/lib/kubelet/pod-resources/kubelet.sock".into(), path(), Restart;
        /// Kubelet's links to containers' logs, whose names say what a container is called that uses a GPU
        /// without a share. No log is read, and none need be there.
        container_logs: PathBuf = "/var/log/containers".into(), path(), Restart;
        /// Quota and usage pages, a directory per allocation: a tmpfs of its own, because containers can
        /// fill it. See `[pages]`.
        pages: PathBuf = "/run/tessera/pages".into(), path(), Restart;
        /// Installed shims, by content: on persistent disk, not mounted noexec.
        shim: PathBuf = "/var/lib/tessera/shim".into(), path(), Restart;
        /// The libtessera.so to install. Empty: the one beside the `tessera` executable.
        shim_source: Option<PathBuf> = None, optional_path(), Restart;
        /// The durable record. The last good configuration is kept beside it.
        ledger: PathBuf = "/var/lib/tessera/ledger.redb".into(), path(), Restart;
        /// Where `tessera status` and its like ask; only root may.
        admin: PathBuf = "/run/tessera/admin.sock".into(), path(), Restart;
        /// libnvidia-ml. Empty: below `driver.root`, or the loader finds `libnvidia-ml.so.1`.
        nvml: Option<PathBuf> = None, optional_path(), Restart;
    }
}

table! {
    /// The file system that holds the pages.
    pub struct Pages {
        /// If `paths.pages` is not a tmpfs of its own, one is mounted there. If that may not be done: do not
        /// start; warn and use the directory; or never mount.
        tmpfs: TmpfsPolicy = TmpfsPolicy::Prefer, word(), Restart;
        /// Its size; one allocation takes 140 KiB.
        size_bytes as "size": u64 = 64 * MIB,
            bytes(MIB, "must be at least 1Mi; one allocation takes 140 KiB"), Restart;
    }
}

table! {
    /// The durable record.
    pub struct Ledger {
        /// Wait for the disk before each answer to kubelet. Without, a power cut may lose the newest records;
        /// no running pod depends on them.
        fsync: bool = true, boolean(), Restart;
        /// A container's record, and with it its memory, is given back when kubelet has not listed it for so
        /// long, and none of its processes uses a GPU any more.
        release_after: Duration = Duration::from_secs(30), time(Duration::from_secs(1), Duration::from_secs(3600));
    }
}

table! {
    /// What Kubernetes hears, beyond what kubelet asks.
    pub struct Kubernetes {
        /// Events on pods (`kubectl describe pod`): refused memory, long waits, bypass, tampering, sick GPUs,
        /// changed quotas. `auto`: where the plugin's pod has a service account's token; see
        /// [trust.md](trust.md). Nothing depends on them.
        events: Events = Events::Auto, word();
    }
}

table! {
    /// Where metrics and probes are served.
    pub struct Metrics {
        /// Where `/metrics`, `/healthz` and `/readyz` are served, by plain HTTP: on every interface, on one, or
        /// nowhere; the first address that can be had. [metrics.md](metrics.md) lists the metrics.
        listen: Vec<SocketAddr> = listen::everywhere(listen::DEFAULT_PORT),
            parsed(listen::parse, |all| listen::show(all), "`:PORT`, `IP:PORT`, or empty", listen::schema), Restart;
    }
}

table! {
    /// Node labels, by which pods choose among unlike nodes.
    pub struct Labels {
        /// A file of node labels for node feature discovery (its worker's `local` source), for instance
        /// `/etc/kubernetes/node-feature-discovery/features.d/tessera`. Empty: none.
        /// [deploy/README.md](../deploy/README.md) lists them.
        nfd_file: Option<PathBuf> = None, optional_path();
    }
}

table! {
    /// What is logged and how.
    pub struct Log {
        /// What is logged: `info,tessera=debug` for instance.
        filter: String = "info".into(), parsed(
            |text| log_filter::parse(text).map(|_| text.to_owned()), String::clone,
            "levels, of all and of modules: `off`, `error`, `warn`, `info`, `debug`, `trace`",
            || json!({ "pattern": log_filter::pattern(), "maxLength": log_filter::LONGEST }),
        );
        /// For people, or one JSON object per line.
        format: LogFormat = LogFormat::Text, word(), Restart;
    }
}
