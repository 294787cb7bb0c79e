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
        /// Kubelet's device-plugin directory, which kubelet has compiled in: another `--root-dir` moves only
        /// the next three.
        kubelet: PathBuf = "/var/lib/kubelet/device-plugins".into(), path(), Restart;
        /// Kubelet's PodResources socket.
        pod_resources: PathBuf = "/var/lib/kubelet/pod-resources/kubelet.sock".into(), path(), Restart;
        /// Where kubelet finds the DRA driver's socket.
        plugins_registry: PathBuf = "/var/lib/kubelet/plugins_registry".into(), path(), Restart;
        /// The DRA driver's own socket and lock.
        dra: PathBuf = "/var/lib/kubelet/plugins/gpu.tessera.dev".into(), path(), Restart;
        /// Kubelet's links to containers' logs, whose names identify a container without a share. The logs are
        /// not read.
        container_logs: PathBuf = "/var/log/containers".into(), path(), Restart;
        /// Quota and usage pages, one directory per allocation; a tmpfs of its own, see `[pages]`.
        pages: PathBuf = "/run/tessera/pages".into(), path(), Restart;
        /// Installed shims, by content: on persistent disk, not mounted noexec.
        shim: PathBuf = "/var/lib/tessera/shim".into(), path(), Restart;
        /// The libtessera.so to install. Empty: the one beside `tessera`.
        shim_source: Option<PathBuf> = None, optional_path(), Restart;
        /// The durable record. The last good configuration is kept beside it.
        ledger: PathBuf = "/var/lib/tessera/ledger.redb".into(), path(), Restart;
        /// Root's socket: `tessera status` and similar commands, and the JSON API; only root may use it.
        admin: PathBuf = "/run/tessera/admin.sock".into(), path(), Restart;
        /// Path of libnvidia-ml. Empty: below `driver.root`, or the loader's.
        nvml: Option<PathBuf> = None, optional_path(), Restart;
    }
}

table! {
    /// The file system that holds the pages.
    pub struct Pages {
        /// Where `paths.pages` is not a tmpfs of its own, `require` and `prefer` mount one; where that is not
        /// permitted, `require` does not start, and `prefer` warns and uses the directory.
        tmpfs: TmpfsPolicy = TmpfsPolicy::Prefer, word(), Restart;
        /// Size of the tmpfs; one allocation takes 140 KiB.
        size_bytes as "size": u64 = 64 * MIB,
            bytes(MIB, "must be at least 1Mi; one allocation takes 140 KiB"), Restart;
    }
}

table! {
    /// The durable record.
    pub struct Ledger {
        /// Whether the plugin waits for the disk before each answer to kubelet. Else a power cut may lose the
        /// newest records.
        fsync: bool = true, boolean(), Restart;
        /// How long kubelet must not have listed a container, and none of its processes used a GPU, before its
        /// share is released.
        release_after: Duration = Duration::from_secs(30), time(Duration::from_secs(1), Duration::from_secs(3600));
    }
}

table! {
    /// What the plugin reports to Kubernetes, beyond what kubelet asks.
    pub struct Kubernetes {
        /// Whether pods get [Kubernetes events](trust.md#kubernetes-events). `auto`: where the plugin's pod has
        /// a service account's token.
        events: Events = Events::Auto, word();
    }
}

table! {
    /// Where metrics and probes are served.
    pub struct Metrics {
        /// Address of [`/metrics`, `/healthz` and `/readyz`](metrics.md): all interfaces, one, or none.
        listen: Vec<SocketAddr> = listen::everywhere(listen::DEFAULT_PORT),
            parsed(listen::parse, |all| listen::show(all), "`:PORT`, `IP:PORT`, or empty", listen::schema), Restart;
    }
}

table! {
    /// Node labels, with which pods choose among different nodes.
    pub struct Labels {
        /// File of [node labels](../deploy/README.md#node-labels) for node feature discovery, such as
        /// `/etc/kubernetes/node-feature-discovery/features.d/tessera`. Empty: none.
        nfd_file: Option<PathBuf> = None, optional_path();
    }
}

table! {
    /// What is logged and how.
    pub struct Log {
        /// Which messages are logged, for instance `info,tessera=debug`.
        filter: String = "info".into(), parsed(
            |text| log_filter::parse(text).map(|_| text.to_owned()), String::clone,
            "levels, of all and of modules: `off`, `error`, `warn`, `info`, `debug`, `trace`",
            || json!({ "pattern": log_filter::pattern(), "maxLength": log_filter::LONGEST }),
        );
        /// Text for people, or one JSON object per line.
        format: LogFormat = LogFormat::Text, word(), Restart;
    }
}
