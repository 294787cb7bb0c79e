//! The words of keys that know a few, in the order in which they are documented.

use super::form::Words;
use super::{
    Compute, DeviceListStrategy, Events, GpuNames, Inject, LogFormat, Placement, SoldByOthers,
    Split, TmpfsPolicy, XidAction,
};

macro_rules! words {
    ($($Type:ident { $($word:literal => $Value:ident),+ $(,)? })+) => {$(
        impl Words for $Type {
            const WORDS: &'static [(&'static str, Self)] = &[$(($word, $Type::$Value)),+];
        }
    )+};
}

words! {
    Compute { "burst" => Burst, "strict" => Strict, "none" => None }
    Placement { "packed" => Packed, "distributed" => Distributed }
    Split { "reject" => Reject, "spread" => Spread }
    SoldByOthers { "refuse" => Refuse, "warn" => Warn, "allow" => Allow }
    Inject { "file" => File, "env" => Env }
    DeviceListStrategy {
        "envvar" => Envvar,
        "volume-mounts" => VolumeMounts,
        "cdi-cri" => CdiCri,
        "cdi-annotations" => CdiAnnotations,
        "device-nodes" => DeviceNodes,
        "none" => None,
    }
    GpuNames { "uuid" => Uuid, "index" => Index }
    TmpfsPolicy { "require" => Require, "prefer" => Prefer, "off" => Off }
    Events { "auto" => Auto, "off" => Off }
    LogFormat { "text" => Text, "json" => Json }
    XidAction {
        "ignore" => Ignore,
        "suspect" => Suspect,
        "unhealthy" => Unhealthy,
        "until-reset" => UntilReset,
    }
}
