//! The values of keys with a fixed set of words, in the order of the documentation.

use super::{Compute, Placement, Split};

/// Declares types, each value with its word; after `for`, a type that is declared elsewhere.
macro_rules! words {
    ($($(#[doc = $about:literal])+ $Type:ident {
        $($(#[doc = $doc:literal])+ $Value:ident = $word:literal,)+
    })+) => {$(
        $(#[doc = $about])+
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $Type {
            $($(#[doc = $doc])+ $Value,)+
        }

        $crate::words::words! { for $Type { $($Value = $word,)+ } }
    )+};
    ($(for $Type:ident { $($Value:ident = $word:literal,)+ })+) => {$(
        impl $crate::form::Words for $Type {
            const WORDS: &'static [(&'static str, Self)] = &[$(($word, $Type::$Value)),+];
        }
    )+};
}

pub(super) use words;

words! {
    for Compute { Burst = "burst", Strict = "strict", None = "none", }
    for Placement { Packed = "packed", Distributed = "distributed", }
    for Split { Reject = "reject", Spread = "spread", Distinct = "distinct", }
}

words! {
    /// What to do about GPUs that another plugin sells too: `gpus.sold_by_others`.
    SoldByOthers {
        /// Nothing more of them is given out.
        Refuse = "refuse",
        /// They are sold, and `status` warns.
        Warn = "warn",
        /// They are sold, and nobody looks.
        Allow = "allow",
    }

    /// What makes a GPU's taint evict the pods that have claimed it: `dra.no_execute`.
    NoExecute {
        /// Its health keeps it from being sold.
        Unhealthy = "unhealthy",
        /// It is cordoned.
        Cordoned = "cordoned",
    }

    /// How the shim gets into a container's processes.
    Inject {
        /// `/etc/ld.so.preload`.
        File = "file",
        /// `LD_PRELOAD`.
        Env = "env",
    }

    /// What a GPU is called in NVIDIA's spec, as `nvidia-ctk cdi generate --device-name-strategy`.
    GpuNames {
        /// By UUID.
        Uuid = "uuid",
        /// By NVML's index.
        Index = "index",
    }

    /// How a container gets its GPUs.
    DeviceListStrategy {
        /// `NVIDIA_VISIBLE_DEVICES`, read by NVIDIA's container toolkit.
        Envvar = "envvar",
        /// `/dev/null` mounted once per GPU, which NVIDIA's container toolkit reads as the list.
        VolumeMounts = "volume-mounts",
        /// Names of CDI devices in the CRI's own field: Kubernetes 1.28 and later.
        CdiCri = "cdi-cri",
        /// Names of CDI devices in the container's annotations, read by the runtime.
        CdiAnnotations = "cdi-annotations",
        /// Device nodes, as `driver.device_nodes` lists them.
        DeviceNodes = "device-nodes",
        /// Nothing: the simulated GPU needs none.
        None = "none",
    }

    /// What to do when `paths.pages` is not a tmpfs of its own and none can be mounted.
    TmpfsPolicy {
        /// Do not start.
        Require = "require",
        /// Start, warn and say so in `tessera status`.
        Prefer = "prefer",
        /// Use the directory as it is.
        Off = "off",
    }

    /// Whether events are sent to the API server.
    Events {
        /// Where the pod has a service account's token.
        Auto = "auto",
        /// Never.
        Off = "off",
    }

    /// What a caller of the JSON API must show.
    ApiAuthorisation {
        /// A token where the pod has a service account's token, else nothing.
        Auto = "auto",
        /// Nothing: on loopback alone.
        None = "none",
        /// A token that the API server accepts.
        Kubernetes = "kubernetes",
    }

    /// Line format of the log.
    LogFormat {
        /// For people.
        Text = "text",
        /// One JSON object per line.
        Json = "json",
    }
}

impl DeviceListStrategy {
    /// Whether containers get pages and shim through a CDI spec.
    pub fn is_cdi(self) -> bool {
        matches!(self, DeviceListStrategy::CdiAnnotations | DeviceListStrategy::CdiCri)
    }
}
