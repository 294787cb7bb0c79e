//! The chart's values as a configuration: what `config` says of them, as the chart makes config.toml of it.

use std::path::Path;

use anyhow::Context;
use serde_json::{Map, Value};
use tessera_config::Config;
use toml::Table;

use super::node::BadConfiguration;

/// What of a file of values is tried.
#[derive(Debug)]
pub struct Values {
    /// The configuration, without what is null.
    pub config: Table,
    /// Keys that describe manifests, or other nodes, and do not count here.
    pub aside: Vec<String>,
}

/// The largest whole number that is the same as a float.
const WHOLE: f64 = 9_007_199_254_740_992.0;

/// Reads a file of values: `config`, with that of the profile `default` laid over it.
///
/// # Errors
/// The file cannot be read; [`BadConfiguration`], with the key of each problem.
pub fn read(file: &Path) -> anyhow::Result<Values> {
    let text =
        std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    of(&text).map_err(|problems| {
        let lines = problems.iter().map(|problem| format!("{}: {problem}", file.display()));
        BadConfiguration(lines.collect::<Vec<_>>().join("\n")).into()
    })
}

fn of(text: &str) -> Result<Values, Vec<String>> {
    let one = |text: String| vec![text];
    let values: Value = serde_saphyr::from_str(text)
        .map_err(|error| one(format!("is no YAML: {}", brief(&error.to_string()))))?;
    let Value::Object(mut values) = values else {
        return Err(one("must be a mapping, as the chart's values.yaml is".to_owned()));
    };
    let base = values.remove("config");
    let profile = match values.get_mut("profiles") {
        Some(Value::Object(profiles)) => match profiles.get_mut("default") {
            Some(Value::Object(profile)) => profile.remove("config"),
            _ => None,
        },
        _ => None,
    };
    let aside: Vec<String> = values.keys().cloned().collect();
    if base.is_none() && profile.is_none() {
        let others = match aside.as_slice() {
            [] => String::new(),
            some => format!("; it has {}", some.join(", ")),
        };
        return Err(one(format!(
            "config: is missing: the configuration stands there, as in the chart's values.yaml{others}"
        )));
    }
    let merged = lay(base.unwrap_or(Value::Null), profile.unwrap_or(Value::Null));
    let mut problems = Vec::new();
    let config = match merged {
        Value::Null => Table::new(),
        Value::Object(map) => table(map, "config", &mut problems),
        _ => return Err(one("config: must be a mapping of the configuration's tables".to_owned())),
    };
    if problems.is_empty()
        && let Err(error) = Config::parse(&config.to_string())
    {
        // The lines are those of a file that nobody has written.
        let named = |problem: &tessera_config::Problem| match problem.key.as_str() {
            "" => format!("config: {}", problem.message),
            key => format!("config.{key}: {}", problem.message),
        };
        problems.extend(error.problems.iter().map(named));
    }
    match problems.is_empty() {
        true => Ok(Values { config, aside }),
        false => Err(problems),
    }
}

/// The first line of what a parser says, without the picture.
fn brief(text: &str) -> String {
    tessera_model::printable::line(text.lines().next().unwrap_or_default()).into_owned()
}

/// One over the other, as the chart lays values: mappings key by key, all else whole, null for "not set".
fn lay(base: Value, over: Value) -> Value {
    match (base, over) {
        (base, Value::Null) => base,
        (Value::Object(mut base), Value::Object(over)) => {
            for (key, value) in over {
                let below = base.remove(&key).unwrap_or(Value::Null);
                if !value.is_null() {
                    base.insert(key, lay(below, value));
                }
            }
            Value::Object(base)
        }
        (_, over) => over,
    }
}

fn table(map: Map<String, Value>, at: &str, problems: &mut Vec<String>) -> Table {
    let mut all = Table::new();
    for (key, value) in map {
        let at = format!("{at}.{key}");
        if let Some(value) = toml_of(value, &at, problems) {
            all.insert(key, value);
        }
    }
    all
}

/// As TOML; nothing for null.
fn toml_of(value: Value, at: &str, problems: &mut Vec<String>) -> Option<toml::Value> {
    Some(match value {
        Value::Null => return None,
        Value::Bool(value) => value.into(),
        Value::String(value) => value.into(),
        Value::Number(number) => match (number.as_i64(), number.as_f64()) {
            (Some(whole), _) => whole.into(),
            // Helm reads all numbers as floats, and the chart writes whole ones as such.
            #[expect(clippy::cast_possible_truncation, reason = "whole and small enough")]
            (None, Some(float)) if float.fract() == 0.0 && float.abs() <= WHOLE => {
                (float as i64).into()
            }
            (None, Some(float)) => float.into(),
            (None, None) => {
                problems.push(format!("{at}: {number} is no number that can be written"));
                return None;
            }
        },
        Value::Array(list) => {
            let items = list.into_iter().enumerate();
            let items = items.filter_map(|(i, one)| toml_of(one, &format!("{at}[{i}]"), problems));
            toml::Value::Array(items.collect())
        }
        Value::Object(map) => table(map, at, problems).into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(text: &str) -> Config {
        let values = of(text).unwrap_or_else(|problems| panic!("{problems:?}"));
        Config::parse(&values.config.to_string()).unwrap()
    }

    #[test]
    fn what_the_chart_would_write_is_what_is_tried() {
        let text = "image: {tag: x}\nconfig:\n  share: {replicas: 3, memory: 4Gi, cores: null}\n  compute:\n    \
                    quantum: 4ms\n  layout:\n  - gpus: [\"0\"]\n    shares:\n    - {resource: tessera.dev/gpu-big, \
                    count: 2.0}\nprofiles:\n  default: {config: {share: {replicas: 5, memory: null}}}\n";
        let tried = config(text);
        assert_eq!((tried.share.replicas, tried.share.memory_bytes), (5, None));
        assert_eq!(tried.compute.quantum, std::time::Duration::from_millis(4));
        assert_eq!(tried.layouts[0].shares[0].count, 2);
        assert_eq!(of(text).unwrap().aside, ["image", "profiles"]);
        assert_eq!(config("config:\n").share.replicas, Config::default().share.replicas);
    }

    #[test]
    fn the_charts_own_values_can_be_tried() {
        let file =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/helm/tessera/values.yaml");
        let values = read(&file).unwrap();
        assert!(values.config.contains_key("share") && values.aside.contains(&"image".to_owned()));
    }

    #[test]
    fn each_mistake_names_its_key() {
        for (text, part) in [
            ("config: {share: {replicas: four}}", "config.share.replicas: "),
            ("config: {share: {replicsa: 4}}", "did you mean `replicas`?"),
            ("config: {compute: {quantum: 2s}}", "config.compute.quantum: "),
            ("config: {shares: {}}", "config.shares"),
            ("config: {share: {replicas: 0}}", "config.share.replicas: "),
            ("config: [1]", "config: must be a mapping"),
            ("config: 4", "config: must be a mapping"),
            ("confg: {share: {}}", "config: is missing"),
            ("", "must be a mapping"),
            ("[1]", "must be a mapping"),
            ("config: {a: b: c}", "is no YAML"),
            ("config: {share: {replicas: 1}, share: {replicas: 2}}", "is no YAML"),
            ("profiles: {default: {config: {share: {replicas: x}}}}", "config.share.replicas: "),
        ] {
            let problems = of(text).unwrap_err();
            assert!(problems.iter().any(|line| line.contains(part)), "{text}: {problems:?}");
        }
    }
}
