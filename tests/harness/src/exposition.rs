//! A strict reader of Prometheus' text format, version 0.0.4: what it accepts, Prometheus accepts.

use std::collections::{BTreeMap, BTreeSet};

#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    pub name: String,
    pub labels: BTreeMap<String, String>,
    pub value: f64,
}

/// A family as it is exposed: the name in `# TYPE`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ExposedFamily {
    /// `counter`, `gauge` or `histogram`.
    pub kind: String,
    /// What it says for people.
    pub help: String,
}

/// A whole answer.
#[derive(Clone, Debug, Default)]
pub struct Exposition {
    pub families: BTreeMap<String, ExposedFamily>,
    pub samples: Vec<Sample>,
}

impl Exposition {
    /// Panics with what is wrong.
    pub fn parse(text: &str) -> Self {
        let mut out = Exposition::default();
        let (mut family, mut seen) = (String::new(), BTreeSet::new());
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# ") {
                let mut parts = rest.splitn(3, ' ');
                let mut next = || parts.next().unwrap_or_else(|| panic!("{line}")).to_owned();
                let (what, name, text) = (next(), next(), next());
                if name != family {
                    assert_eq!(what, "HELP", "{line}");
                    let again = out.families.insert(name.clone(), ExposedFamily::default());
                    assert!(again.is_none(), "twice: {name}");
                    family = name;
                }
                let exposed = out.families.get_mut(&family).unwrap();
                match what.as_str() {
                    "HELP" => exposed.help = text,
                    "TYPE" => exposed.kind = text,
                    _ => panic!("{line}"),
                }
            } else {
                let sample = sample(line);
                let exposed = &out.families[&family];
                let suffix = sample.name.strip_prefix(family.as_str());
                let suffix = suffix.unwrap_or_else(|| panic!("{line} in {family}"));
                let fits = match exposed.kind.as_str() {
                    "counter" | "gauge" => suffix.is_empty(),
                    "histogram" => ["_sum", "_count", "_bucket"].contains(&suffix),
                    _ => false,
                };
                assert!(fits, "{line} in a {} {family}", exposed.kind);
                let le = sample.labels.contains_key("le");
                assert_eq!(le, suffix == "_bucket", "{line}");
                assert!(sample.value.is_finite() && sample.value >= 0.0, "{line}");
                let key = (sample.name.clone(), sample.labels.clone());
                assert!(seen.insert(key), "twice: {line}");
                out.samples.push(sample);
            }
        }
        assert!(text.is_empty() || text.ends_with('\n'));
        out
    }

    pub fn of<'e>(&'e self, name: &'e str) -> impl Iterator<Item = &'e Sample> + 'e {
        self.samples.iter().filter(move |sample| sample.name == name)
    }

    /// The sum of the series of that name that have these labels.
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let has = |sample: &&Sample| {
            labels
                .iter()
                .all(|(key, value)| sample.labels.get(*key).map_or("", String::as_str) == *value)
        };
        self.of(name).filter(has).map(|sample| sample.value).sum()
    }
}

fn sample(line: &str) -> Sample {
    let end = line.find(['{', ' ']).unwrap_or_else(|| panic!("{line}"));
    let (name, mut rest) = line.split_at(end);
    let mut labels = BTreeMap::new();
    if let Some(inner) = rest.strip_prefix('{') {
        let mut inner = inner;
        while !inner.starts_with('}') {
            let (key, value) = inner.split_once("=\"").unwrap_or_else(|| panic!("{line}"));
            let (mut text, mut chars) = (String::new(), value.char_indices());
            let after = loop {
                match chars.next().unwrap_or_else(|| panic!("{line}")) {
                    (at, '"') => break &value[at + 1..],
                    (_, '\\') => match chars.next().unwrap().1 {
                        'n' => text.push('\n'),
                        other => text.push(other),
                    },
                    (_, other) => text.push(other),
                }
            };
            assert!(labels.insert(key.to_owned(), text).is_none(), "{line}");
            inner = after.strip_prefix(',').unwrap_or(after);
        }
        rest = &inner[1..];
    }
    let value = rest.strip_prefix(' ').unwrap_or_else(|| panic!("{line}"));
    let value = value.parse().unwrap_or_else(|_| panic!("{line}"));
    Sample { name: name.to_owned(), labels, value }
}
