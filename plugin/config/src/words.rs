//! The values of keys with a fixed set of words, in the order of the documentation.

use super::form::Words;
use super::{
    ApiAuthorisation, Compute, DeviceListStrategy, Events, GpuNames, Inject, LogFormat, NoExecute,
    Placement, SoldByOthers, Split, TmpfsPolicy, XidAction,
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
    Split { "reject" => Reject, "spread" => Spread, "distinct" => Distinct }
    SoldByOthers { "refuse" => Refuse, "warn" => Warn, "allow" => Allow }
    NoExecute { "unhealthy" => Unhealthy, "cordoned" => Cordoned }
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
    ApiAuthorisation { "auto" => Auto, "none" => None, "kubernetes" => Kubernetes }
    LogFormat { "text" => Text, "json" => Json }
    XidAction {
        "ignore" => Ignore,
        "suspect" => Suspect,
        "unhealthy" => Unhealthy,
        "until-reset" => UntilReset,
    }
}
