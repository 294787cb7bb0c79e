//! Health and cordons as taints of a device, and since when each is there.

use std::collections::BTreeMap;

use tessera_cluster::k8s_openapi::api::resource::v1::{Device, DeviceTaint, ResourceSlice};
use tessera_cluster::k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use tessera_cluster::k8s_openapi::jiff::Timestamp;
use tessera_config::{Config, NoExecute};

use super::Published;

/// A GPU that its health keeps from being sold.
pub const UNHEALTHY: &str = "gpu.tessera.dev/unhealthy";
/// A GPU that an operator has cordoned.
pub const CORDONED: &str = "gpu.tessera.dev/cordoned";
/// No new claims.
pub const NO_SCHEDULE: &str = "NoSchedule";
/// No new claims, and pods that have claimed it are evicted.
pub const NO_EXECUTE: &str = "NoExecute";
/// Longest value of a taint, in bytes.
const LONGEST: usize = 63;

/// The taints of a GPU. When they were added is not said yet; see [`Since`].
pub fn taints(gpu: &Published, config: &Config) -> Vec<DeviceTaint> {
    let effect = |cause: NoExecute| match config.dra.no_execute.contains(&cause) {
        true => NO_EXECUTE,
        false => NO_SCHEDULE,
    };
    let sick = gpu.sold.sick.as_ref();
    let sick = sick.map(|why| (UNHEALTHY, label_value(why), effect(NoExecute::Unhealthy)));
    // Slices are for everybody who may read them: who cordoned it and why is the operators'.
    let cordon = (CORDONED, String::new(), effect(NoExecute::Cordoned));
    let cordon = gpu.is_cordoned.then_some(cordon);
    let taint = |(key, value, effect): (&str, String, &str)| DeviceTaint {
        key: key.to_owned(),
        value: Some(value).filter(|value| !value.is_empty()),
        effect: effect.to_owned(),
        time_added: None,
    };
    sick.into_iter().chain(cordon).map(taint).collect()
}

/// Words as a label's value can say them.
fn label_value(text: &str) -> String {
    let mut value = String::new();
    for c in text.chars() {
        let c = if c.is_ascii_alphanumeric() || "_.-".contains(c) { c } else { '-' };
        if !(c == '-' && value.ends_with('-')) {
            value.push(c);
        }
    }
    let is_edge = |c: char| !c.is_ascii_alphanumeric();
    let value = value.trim_matches(is_edge);
    value[..value.len().min(LONGEST)].trim_end_matches(is_edge).to_owned()
}

/// Since when each taint is there: pods that tolerate one for a while are evicted by this time, so it must not
/// begin again with each write, or with another plugin.
#[derive(Clone, Debug, Default)]
pub struct Since(BTreeMap<(String, String, String), Timestamp>);

impl Since {
    /// Takes over what is published.
    pub fn learn(&mut self, slices: &[ResourceSlice]) {
        let devices = slices.iter().flat_map(|slice| slice.spec.devices.iter().flatten());
        for device in devices {
            for taint in device.taints.iter().flatten() {
                if let Some(Time(added)) = taint.time_added {
                    let since = self.0.entry(key(device, taint)).or_insert(added);
                    *since = added.min(*since);
                }
            }
        }
    }

    /// Says of each taint when it was added: `now`, seconds, where it is new. Those that are gone are forgotten.
    pub fn stamp<'d>(&mut self, devices: impl IntoIterator<Item = &'d mut Device>, now: Timestamp) {
        let now = Timestamp::from_second(now.as_second()).unwrap_or(now);
        let mut kept = BTreeMap::new();
        for device in devices {
            let name = device.name.clone();
            for taint in device.taints.iter_mut().flatten() {
                let key = (name.clone(), taint.key.clone(), taint.effect.clone());
                let since = self.0.get(&key).copied().unwrap_or(now);
                taint.time_added = Some(Time(since));
                kept.insert(key, since);
            }
        }
        self.0 = kept;
    }
}

fn key(device: &Device, taint: &DeviceTaint) -> (String, String, String) {
    (device.name.clone(), taint.key.clone(), taint.effect.clone())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::gpu;

    fn sick() -> Published {
        let mut sick = Published { is_cordoned: true, ..gpu("GPU-a", 0) };
        sick.sold.sick = Some("XID 79, number 3 within 10m".to_owned());
        sick
    }

    fn rows(taints: &[DeviceTaint]) -> Vec<(&str, &str, &str)> {
        let row = |taint: &'_ DeviceTaint| {
            let value = taint.value.as_deref().unwrap_or_default();
            (
                taint.key.clone().leak() as &str,
                value.to_owned().leak() as &str,
                taint.effect.clone().leak() as &str,
            )
        };
        taints.iter().map(row).collect()
    }

    #[test]
    fn trouble_keeps_new_pods_away_and_evicts_only_where_configured() {
        assert_eq!(taints(&gpu("GPU-a", 0), &Config::default()), []);
        let value = "XID-79-number-3-within-10m";
        assert_eq!(
            rows(&taints(&sick(), &Config::default())),
            [(UNHEALTHY, value, NO_SCHEDULE), (CORDONED, "", NO_SCHEDULE)]
        );
        let config = Config::parse("[dra]\nno_execute = [\"unhealthy\"]").unwrap();
        let effects: Vec<_> = taints(&sick(), &config).into_iter().map(|t| t.effect).collect();
        assert_eq!(effects, [NO_EXECUTE, NO_SCHEDULE]);
    }

    #[test]
    fn values_are_labels() {
        for (text, want) in [
            ("", ""),
            ("NVML: GPU is lost!", "NVML-GPU-is-lost"),
            ("--x..", "x"),
            ("ü", ""),
            (&format!("{}  y", "a".repeat(62)), &"a".repeat(62)),
        ] {
            assert_eq!(label_value(text), want);
        }
    }

    #[test]
    fn a_taint_keeps_its_time_until_it_is_lifted() {
        let devices = || {
            vec![Device {
                name: "gpu-a".to_owned(),
                taints: Some(taints(&sick(), &Config::default())),
                ..Device::default()
            }]
        };
        let at = |second| Timestamp::from_second(second).unwrap();
        let added = |devices: &[Device]| -> Vec<i64> {
            let taints = devices[0].taints.iter().flatten();
            taints.map(|taint| taint.time_added.as_ref().unwrap().0.as_second()).collect()
        };
        let (mut since, mut first) = (Since::default(), devices());
        since.stamp(&mut first, Timestamp::from_millisecond(100_999).unwrap());
        assert_eq!(added(&first), [100, 100]);
        // Another plugin finds them published.
        let mut slice = ResourceSlice::default();
        slice.spec.devices = Some(first);
        let mut other = Since::default();
        other.learn(&[slice]);
        let mut second = devices();
        second[0].taints.as_mut().unwrap()[0].value = Some("another-reason".to_owned());
        other.stamp(&mut second, at(200));
        assert_eq!(added(&second), [100, 100]);
        // One is lifted, and comes back.
        let mut without = devices();
        without[0].taints.as_mut().unwrap().pop();
        other.stamp(&mut without, at(300));
        let mut back = devices();
        other.stamp(&mut back, at(400));
        assert_eq!(added(&back), [100, 400]);
    }
}
