//! What a claim asks for, and what it would consume of a device, as the scheduler reckons it.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tessera_model::quantity::{format_bytes, parse_bytes};

/// Capacity of one request: bytes, and percent of the GPU's time; what is left out is the device's default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Size {
    /// Bytes.
    pub memory: Option<u64>,
    /// Percent.
    pub cores: Option<u64>,
}

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const GOOD: &str = "write memory=4Gi, cores=30, or memory=4Gi,cores=30";
        let mut size = Size::default();
        for part in text.split(',') {
            let (name, value) = part.split_once('=').ok_or_else(|| GOOD.to_owned())?;
            let of = match name.trim() {
                "memory" => &mut size.memory,
                "cores" => &mut size.cores,
                other => return Err(format!("a device has no {other:?}; {GOOD}")),
            };
            if of.is_some() {
                return Err(format!("{} is said twice", name.trim()));
            }
            let value = value.trim();
            let number = match name.trim() {
                "memory" => parse_bytes(value).map_err(|error| format!("memory: {error}"))?,
                _ => value.strip_suffix('%').unwrap_or(value).parse().unwrap_or(0),
            };
            if number == 0 {
                let range = if name.trim() == "cores" { "from 1 to 100" } else { "more than 0" };
                return Err(format!("{}: {value:?} is no number {range}", name.trim()));
            }
            *of = Some(number);
        }
        match size.cores {
            Some(101..) => Err("cores: a GPU has 100".to_owned()),
            _ => Ok(size),
        }
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let memory = self.memory.map(|bytes| format!("memory={}", format_bytes(bytes)));
        let cores = self.cores.map(|cores| format!("cores={cores}"));
        f.write_str(&memory.into_iter().chain(cores).collect::<Vec<_>>().join(","))
    }
}

/// What a claim has of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Consumed {
    /// Bytes.
    pub memory: u64,
    /// Percent.
    pub cores: u64,
}

/// What a device of a slice has in all; `None` for one that has no such capacity.
pub fn whole(device: &Value) -> Option<Consumed> {
    let of = |name: &str| number(&device["capacity"][name]["value"]);
    Some(Consumed { memory: of("memory")?, cores: of("cores")? })
}

/// What this size takes of it: the policy's default where nothing is asked, else whole steps (KEP 5075).
pub fn consumed(device: &Value, size: Size) -> Option<Consumed> {
    let of = |name: &str, asked: Option<u64>| {
        let capacity = &device["capacity"][name];
        let policy = &capacity["requestPolicy"];
        let Some(asked) = asked else { return number(&policy["default"]) };
        let range = &policy["validRange"];
        let min = number(&range["min"]).unwrap_or(0);
        let step = number(&range["step"]).filter(|step| *step > 0).unwrap_or(1);
        let above = asked.max(min) - min;
        above.checked_next_multiple_of(step)?.checked_add(min)
    };
    Some(Consumed { memory: of("memory", size.memory)?, cores: of("cores", size.cores)? })
}

fn number(quantity: &Value) -> Option<u64> {
    match quantity {
        Value::String(text) => parse_bytes(text).ok(),
        Value::Number(number) => number.as_u64(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_size_is_memory_cores_or_both() {
        let size = |text: &str| text.parse::<Size>();
        assert_eq!(
            size("memory=4Gi,cores=30"),
            Ok(Size { memory: Some(4 << 30), cores: Some(30) })
        );
        assert_eq!(size("cores=30%"), Ok(Size { memory: None, cores: Some(30) }));
        for (wrong, says) in [
            ("", "write memory=4Gi"),
            ("4Gi", "write memory=4Gi"),
            ("memory=lots", "memory: "),
            ("memory=0", "more than 0"),
            ("cores=0", "from 1 to 100"),
            ("cores=half", "from 1 to 100"),
            ("cores=101", "has 100"),
            ("gpus=1", "no \"gpus\""),
            ("cores=1,cores=2", "said twice"),
            ("memory=1Gi,", "write memory=4Gi"),
        ] {
            let error = size(wrong).unwrap_err();
            assert!(error.contains(says), "{wrong}: {error}");
        }
    }

    #[test]
    fn what_is_consumed_is_a_whole_number_of_steps_or_the_default() {
        let policy = |default: &str, min: &str, step: &str| json!({ "default": default, "validRange": { "min": min, "step": step } });
        let device = json!({ "capacity": {
            "memory": { "value": "15872Mi", "requestPolicy": policy("3968Mi", "128Mi", "64Mi") },
            "cores": { "value": "100", "requestPolicy": policy("25", "1", "1") },
        }});
        let of = |text: &str| consumed(&device, text.parse().unwrap()).unwrap();
        assert_eq!(of("memory=1000Mi,cores=30"), Consumed { memory: 1024 << 20, cores: 30 });
        assert_eq!(of("cores=30"), Consumed { memory: 3968 << 20, cores: 30 });
        assert_eq!(of("memory=1Mi"), Consumed { memory: 128 << 20, cores: 25 });
    }
}
