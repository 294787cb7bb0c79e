//! `[health]`, `[paths]`, `[pages]`, `[ledger]`, `[kubernetes]` and `[log]`.

use std::net::SocketAddr;

use super::super::{XidAction, choices};
use super::Takes::{AtOnce, Restart};
use super::{Key, Show, each, one, toml};

pub(super) const HEALTH: &[Key] = &[
    one(
        "health.probe_interval",
        "time from 100ms to 24h",
        AtOnce,
        |c| toml::time(c.health.probe_interval),
        "How often each GPU is asked whether it answers.",
    ),
    one(
        "health.probes_failed",
        "whole number from 1 to 100",
        AtOnce,
        |c| c.health.probes_failed.to_string(),
        "So many unanswered probes in a row: lost, all its replicas Unhealthy.",
    ),
    one(
        "health.probes_passed",
        "whole number from 1 to 100",
        AtOnce,
        |c| c.health.probes_passed.to_string(),
        "So many answered ones in a row begin its recovery.",
    ),
    one(
        "health.recovery",
        "time from 100ms to 24h",
        AtOnce,
        |c| toml::time(c.health.recovery),
        "How long it must then be quiet before it is sold again; each relapse doubles that …",
    ),
    one(
        "health.recovery_max",
        "time, at least `health.recovery`",
        AtOnce,
        |c| toml::time(c.health.recovery_max),
        "… up to this.",
    ),
    one(
        "health.suspect_count",
        "whole number from 1 to 100",
        AtOnce,
        |c| c.health.suspect_count.to_string(),
        "So many suspicions …",
    ),
    one(
        "health.suspect_window",
        "time from 100ms to 24h",
        AtOnce,
        |c| toml::time(c.health.suspect_window),
        "… within this time make it unhealthy; after as long without another it is healthy.",
    ),
    one(
        "health.xid_default",
        "`ignore`, `suspect`, `unhealthy`, `until-reset`",
        AtOnce,
        |c| toml::word(&c.health.xid_default, &XidAction::WORDS),
        "What an XID means that the table does not name.",
    ),
    each(
        "health.xid",
        "table: XID = as `health.xid_default`",
        AtOnce,
        |c| {
            let word = |action| toml::word(action, &XidAction::WORDS);
            c.health.xid.iter().map(|(xid, a)| (format!("health.xid.{xid}"), word(a))).collect()
        },
        "What an XID means. Named here, it changes single rows of the built-in table: see \
         [plugin.md](plugin.md#health).",
    ),
];

/// As it is written: two unspecified addresses stand for every interface.
fn listen(addresses: &[SocketAddr]) -> String {
    match addresses {
        [] => toml::string(""),
        [one] => toml::string(&one.to_string()),
        [first, ..] => toml::string(&format!(":{}", first.port())),
    }
}

/// A path, which a running plugin keeps.
macro_rules! path {
    ($name:literal, $field:ident, $meaning:literal) => {
        Key {
            name: $name,
            form: "absolute path",
            takes: Restart(|to, from| to.paths.$field.clone_from(&from.paths.$field)),
            meaning: $meaning,
            show: Show::One(|c| toml::path(Some(&c.paths.$field))),
        }
    };
    ($name:literal, $field:ident, optional, $meaning:literal) => {
        Key {
            name: $name,
            form: "absolute path, or empty",
            takes: Restart(|to, from| to.paths.$field.clone_from(&from.paths.$field)),
            meaning: $meaning,
            show: Show::One(|c| toml::path(c.paths.$field.as_deref())),
        }
    };
}

pub(super) const KEYS: &[Key] = &[
    path!("paths.kubelet", kubelet, "Kubelet's device-plugin directory."),
    path!("paths.pod_resources", pod_resources, "Kubelet's PodResources socket."),
    path!(
        "paths.container_logs",
        container_logs,
        "Kubelet's links to containers' logs, whose names say what a container is called that uses a GPU \
         without a share. No log is read, and none need be there."
    ),
    path!(
        "paths.pages",
        pages,
        "Quota and usage pages, a directory per allocation: a tmpfs of its own, because containers can \
         fill it."
    ),
    path!(
        "paths.shim",
        shim,
        "Installed shims, by content: on persistent disk, not mounted noexec."
    ),
    path!(
        "paths.shim_source",
        shim_source,
        optional,
        "The libtessera.so to install. Empty: the one beside the `tessera` executable."
    ),
    path!(
        "paths.ledger",
        ledger,
        "The durable record. The last good configuration is kept beside it."
    ),
    path!("paths.admin", admin, "Where `tessera status` and its like ask; only root may."),
    path!(
        "paths.nvml",
        nvml,
        optional,
        "libnvidia-ml. Empty: below `driver.root`, or the loader finds `libnvidia-ml.so.1`."
    ),
    one(
        "pages.tmpfs",
        "`require`, `prefer`, `off`",
        Restart(|to, from| to.pages.tmpfs = from.pages.tmpfs),
        |c| toml::word(&c.pages.tmpfs, &choices::TMPFS),
        "If `paths.pages` is not a tmpfs of its own, one is mounted there. If that may not be done: do \
         not start; warn and use the directory; or never mount.",
    ),
    one(
        "pages.size",
        "quantity, bytes, at least `1Mi`",
        Restart(|to, from| to.pages.size_bytes = from.pages.size_bytes),
        |c| toml::bytes(c.pages.size_bytes),
        "Its size; one allocation takes 140 KiB.",
    ),
    one(
        "ledger.fsync",
        "`true`, `false`",
        Restart(|to, from| to.ledger.fsync = from.ledger.fsync),
        |c| c.ledger.fsync.to_string(),
        "Wait for the disk before each answer to kubelet. Without, a power cut may lose the newest \
         records; no running pod depends on them.",
    ),
    one(
        "ledger.release_after",
        "time from 1s to 1h",
        AtOnce,
        |c| toml::time(c.ledger.release_after),
        "A container's record, and with it its memory, is given back when kubelet has not listed it for \
         so long, and none of its processes uses a GPU any more.",
    ),
    one(
        "kubernetes.events",
        "`auto`, `off`",
        AtOnce,
        |c| toml::word(&c.kubernetes.events, &choices::EVENTS),
        "Events on pods (`kubectl describe pod`): refused memory, long waits, bypass, tampering, sick GPUs, \
         changed quotas. `auto`: where the plugin's pod has a service account's token; see \
         [trust.md](trust.md). Nothing depends on them.",
    ),
    one(
        "metrics.listen",
        "`:PORT`, `IP:PORT`, or empty",
        Restart(|to, from| to.metrics.listen.clone_from(&from.metrics.listen)),
        |c| listen(&c.metrics.listen),
        "Where `/metrics`, `/healthz` and `/readyz` are served, by plain HTTP: on every interface, on one, or \
         nowhere. [metrics.md](metrics.md) lists the metrics.",
    ),
    one(
        "labels.nfd_file",
        "absolute path, or empty",
        AtOnce,
        |c| toml::path(c.labels.nfd_file.as_deref()),
        "A file of node labels for node feature discovery. Empty: none.",
    ),
    one(
        "log.filter",
        "levels, of all and of modules: `off`, `error`, `warn`, `info`, `debug`, `trace`",
        AtOnce,
        |c| toml::string(&c.log.filter),
        "What is logged: `info,tessera=debug` for instance.",
    ),
    one(
        "log.format",
        "`text`, `json`",
        Restart(|to, from| to.log.format = from.log.format),
        |c| toml::word(&c.log.format, &choices::FORMAT),
        "How.",
    ),
];
