//! The values of keys with a fixed set of words, in the order of the documentation, and the meaning of each XID.

use strum::{IntoStaticStr, VariantArray};

/// What to do about GPUs that another plugin sells too: `gpus.sold_by_others`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "kebab-case")]
pub enum SoldByOthers {
    /// Nothing more of them is given out.
    Refuse,
    /// They are sold, and `status` warns.
    Warn,
    /// They are sold, and nobody looks.
    Allow,
}

/// What makes a GPU's taint evict the pods that have claimed it: `dra.no_execute`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "kebab-case")]
pub enum NoExecute {
    Unhealthy,
    Cordoned,
}

/// How the shim gets into a container's processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "kebab-case")]
pub enum Inject {
    /// `/etc/ld.so.preload`.
    File,
    /// `LD_PRELOAD`.
    Env,
}

/// What a GPU is called in NVIDIA's spec, as `nvidia-ctk cdi generate --device-name-strategy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "kebab-case")]
pub enum GpuNames {
    Uuid,
    Index,
}

/// How a container gets its GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "kebab-case", const_into_str)]
pub enum DeviceListStrategy {
    /// `NVIDIA_VISIBLE_DEVICES`, read by NVIDIA's container toolkit.
    Envvar,
    /// `/dev/null` mounted once per GPU, which NVIDIA's container toolkit reads as the list.
    VolumeMounts,
    /// Names of CDI devices in the CRI's own field: Kubernetes 1.28 and later.
    CdiCri,
    /// Names of CDI devices in the container's annotations, read by the runtime.
    CdiAnnotations,
    /// Device nodes, as `driver.device_nodes` lists them.
    DeviceNodes,
    /// Nothing: the simulated GPU needs none.
    None,
}

/// What to do when `paths.pages` is not a tmpfs of its own and none can be mounted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "kebab-case")]
pub enum TmpfsPolicy {
    Require,
    /// Start, warn and say so in `tessera status`.
    Prefer,
    Off,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "kebab-case")]
pub enum Events {
    /// Where the pod has a service account's token.
    Auto,
    Off,
}

/// What a caller of the JSON API must show.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "kebab-case")]
pub enum ApiAuthorisation {
    /// A token where the pod has a service account's token, else nothing.
    Auto,
    /// Nothing: on loopback alone.
    None,
    /// A token that the API server accepts.
    Kubernetes,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "kebab-case")]
pub enum LogFormat {
    Text,
    Json,
}

impl DeviceListStrategy {
    /// Whether containers get pages and shim through a CDI spec.
    pub fn is_cdi(self) -> bool {
        matches!(self, DeviceListStrategy::CdiAnnotations | DeviceListStrategy::CdiCri)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "kebab-case", const_into_str)]
pub enum XidAction {
    /// Nothing: a program's own fault.
    Ignore,
    /// One is a warning, several within a time are not.
    Suspect,
    /// Out of service until it has been quiet.
    Unhealthy,
    /// Out of service until the driver shows that it was reset.
    UntilReset,
}

use XidAction::{Ignore, Suspect, Unhealthy, UntilReset};

/// Number, meaning, reason; by number.
pub const XIDS: &[(u32, XidAction, &str)] = &[
    (13, Ignore, "graphics engine exception: a program's own fault (RESTART_APP)"),
    (31, Ignore, "page fault of a program (RESTART_APP)"),
    (43, Ignore, "a program's channel was reset (IGNORE)"),
    (45, Ignore, "channels removed after a program's end or another XID"),
    (46, UntilReset, "the GPU stopped processing (RESET_GPU)"),
    (48, UntilReset, "uncorrectable ECC error: reset, unless the driver contained it"),
    (61, UntilReset, "microcontroller breakpoint: older GPUs need a reset"),
    (62, UntilReset, "microcontroller halt (RESET_GPU)"),
    (63, Ignore, "a row was remapped: takes effect at the next reset, the GPU is usable (IGNORE)"),
    (64, UntilReset, "a row could not be remapped (RESET_GPU)"),
    (68, Ignore, "video decoder exception: a program's own fault (RESTART_APP)"),
    (74, UntilReset, "NVLink error: links stay down until a reset"),
    (79, UntilReset, "fallen off the bus (RESTART_BM)"),
    (92, Ignore, "many corrected single-bit errors (IGNORE)"),
    (94, Suspect, "contained ECC error: one program suffered; several of them are bad memory"),
    (95, UntilReset, "uncontained ECC error: any program may have suffered (RESET_GPU)"),
    (
        109,
        Ignore,
        "context switch timeout: mostly a program's own; where it takes a reset, the \
                   driver's recovery action says so",
    ),
    (110, UntilReset, "security fault (RESET_GPU)"),
    (119, UntilReset, "GSP does not answer (RESET_GPU)"),
    (120, UntilReset, "GSP error (RESET_GPU)"),
    (136, UntilReset, "NVLink training failed (RESET_GPU)"),
    (140, UntilReset, "unrecovered ECC error (RESET_GPU)"),
    (143, UntilReset, "GPU initialisation failed (RESET_GPU)"),
    (144, Unhealthy, "NVLink 5 (SAW): the driver's recovery action says if it takes a reset"),
    (145, Unhealthy, "NVLink 5 (RLW): as 144"),
    (146, Unhealthy, "NVLink 5 (TLW): as 144"),
    (147, Unhealthy, "NVLink 5 (TREX): as 144"),
    (148, Unhealthy, "NVLink 5 (NVLPW): as 144"),
    (149, Unhealthy, "NVLink 5 (NETIR): as 144"),
    (150, Unhealthy, "NVLink 5 (MSE): as 144"),
    (151, UntilReset, "key rotation failed (RESTART_VM)"),
    (154, Ignore, "the recovery action changed: it is asked of NVML at once"),
    (155, UntilReset, "NVLink, by software (RESET_GPU)"),
    (156, UntilReset, "a resource was retired (RESET_GPU)"),
    (158, UntilReset, "fatal timeout (RESET_GPU)"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_documentation_has_the_table() {
        let text = include_str!("../../../docs/health.md");
        for (xid, action, reason) in XIDS {
            let row = format!("| {xid} | {} | {reason} |", action.into_str());
            assert!(text.contains(&row), "docs/health.md lacks: {row}");
        }
    }

    #[test]
    fn the_table_is_in_order_and_names_each_once() {
        assert!(XIDS.windows(2).all(|pair| pair[0].0 < pair[1].0));
    }
}
