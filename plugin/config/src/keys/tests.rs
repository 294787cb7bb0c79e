//! What follows from the declarations; and that the schema and the reader agree on the same values, as far as
//! [`crate::table`] says.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt::Write;

use proptest::prelude::*;
use proptest::strategy::ValueTree as _;
use proptest::string::string_regex;
use proptest::test_runner::TestRunner;
use regex::Regex;
use serde_json::{Map, Value, json};

use super::*;
use crate::table::{Key, Table, plain};
use crate::tables::EXAMPLE;

#[test]
fn what_differs_is_described_key_by_key() {
    let before = Config::parse("[share]\nreplicas = 4\n[health.xid]\n94 = \"ignore\"").unwrap();
    let after = Config::parse(
        "[share]\nreplicas = 8\nmemory = \"1.5Gi\"\n[[layout]]\ngpus = [\"0\"]\n\
         shares = [{ resource = \"x.dev/a\", memory = \"12.5%\" }]\n[log]\nformat = \"json\"\n",
    )
    .unwrap();
    let described: Vec<String> = differences(&before, &after)
        .into_iter()
        .map(|d| {
            let value = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
            format!("{}: {} to {} {}", d.key, value(d.before), value(d.after), d.takes.text())
        })
        .collect();
    assert_eq!(
        described,
        [
            "share.replicas: 4 to 8 at once",
            "share.memory: \"auto\" to \"1536Mi\" for new pods",
            "layout[0].gpus: - to [\"0\"] at once",
            "layout[0].shares[0].resource: - to \"x.dev/a\" at once",
            "layout[0].shares[0].count: - to 1 at once",
            "layout[0].shares[0].memory: - to \"12.5%\" for new pods",
            "layout[0].shares[0].cores: - to \"auto\" for new pods",
            "health.xid.94: \"ignore\" to \"suspect\" at once",
            "log.format: \"text\" to \"json\" after a restart",
        ]
    );
}

/// A file of the repository that follows from the declarations: `TESSERA_REGENERATE=1` writes it.
fn follows(name: &str, text: &str) {
    let file = format!("{}/../../{name}", env!("CARGO_MANIFEST_DIR"));
    if std::env::var_os("TESSERA_REGENERATE").is_some() {
        std::fs::write(&file, text).unwrap();
    }
    let committed = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(
        committed == text,
        "{name} is not what the declarations in config/tables say; run this test with \
         TESSERA_REGENERATE=1 and commit the file"
    );
}

#[test]
fn the_reference_is_what_the_code_says() {
    follows("docs/configuration.md", &reference());
}

#[test]
fn the_commented_file_is_what_the_code_says() {
    follows("config.toml", &commented());
}

thread_local! {
    static COMPILED: RefCell<HashMap<String, Regex>> = RefCell::default();
}

/// What of JSON Schema [`schema`] uses. A keyword that is not here fails the test.
fn accepts(schema: &Value, value: &Value) -> bool {
    let matches = |pattern: &Value, text: &str| {
        let pattern = pattern.as_str().expect("a pattern");
        COMPILED.with_borrow_mut(|compiled| {
            let new = || Regex::new(pattern).expect("a regular expression");
            compiled.entry(pattern.to_owned()).or_insert_with(new).is_match(text)
        })
    };
    let bound = |limit: &Value, holds: fn(f64, f64) -> bool| {
        value.as_f64().is_none_or(|number| holds(number, limit.as_f64().expect("a number")))
    };
    let is = |kind: &Value| match kind.as_str().expect("a type") {
        "boolean" => value.is_boolean(),
        "string" => value.is_string(),
        "number" => value.is_number(),
        "integer" => value.as_f64().is_some_and(|number| number.fract() == 0.0),
        "array" => value.is_array(),
        "object" => value.is_object(),
        other => panic!("unknown type {other}"),
    };
    let known = schema["properties"].as_object();
    schema.as_object().expect("a schema").iter().all(|(keyword, argument)| match keyword.as_str() {
        "description" | "title" | "default" | "$schema" => true,
        "type" => argument.as_array().map_or_else(|| is(argument), |kinds| kinds.iter().any(is)),
        "enum" => argument.as_array().expect("values").contains(value),
        "pattern" => value.as_str().is_none_or(|text| matches(argument, text)),
        "not" => !accepts(argument, value),
        "minimum" => bound(argument, |number, least| number >= least),
        "maximum" => bound(argument, |number, most| number <= most),
        "multipleOf" => bound(argument, |number, unit| number % unit == 0.0),
        "exclusiveMinimum" => bound(argument, |number, least| number > least),
        "minLength" | "maxLength" => value.as_str().is_none_or(|text| {
            let (length, limit) =
                (text.chars().count() as u64, argument.as_u64().expect("a length"));
            if keyword == "minLength" { length >= limit } else { length <= limit }
        }),
        "minItems" => {
            value.as_array().is_none_or(|all| all.len() as u64 >= argument.as_u64().unwrap())
        }
        "items" => value.as_array().is_none_or(|all| all.iter().all(|one| accepts(argument, one))),
        "required" => value.as_object().is_none_or(|table| {
            argument.as_array().unwrap().iter().all(|key| table.contains_key(key.as_str().unwrap()))
        }),
        "properties" => value.as_object().is_none_or(|table| {
            table
                .iter()
                .all(|(key, value)| argument.get(key).is_none_or(|schema| accepts(schema, value)))
        }),
        "propertyNames" => value
            .as_object()
            .is_none_or(|table| table.keys().all(|key| accepts(argument, &json!(key)))),
        "additionalProperties" => value.as_object().is_none_or(|table| {
            let others =
                table.iter().filter(|(key, _)| !known.is_some_and(|all| all.contains_key(*key)));
            others.into_iter().all(|(_, value)| match argument {
                Value::Bool(any) => *any,
                schema => accepts(schema, value),
            })
        }),
        other => panic!("the test does not know the keyword {other}"),
    })
}

/// What the reader says of a key's value, as TOML.
fn reads(key: &str, value: &Value) -> Result<(), String> {
    Config::parse(&file(key, value)).map(drop).map_err(|error| error.to_string())
}

/// A file with `value` at a dotted key, of a table in an array with what else that must have.
fn file(key: &str, value: &Value) -> String {
    let share = |key: &str| {
        let mut share = json!({ "resource": "a.b/c" });
        share[key] = value.clone();
        json!([{ "gpus": ["0"], "shares": [share] }])
    };
    let mut root = Map::new();
    if let Some(key) = key.strip_prefix("layout[].shares[].") {
        root.insert("layout".to_owned(), share(key));
    } else if let Some(key) = key.strip_prefix("layout[].") {
        let mut layout = share("resource")[0].clone();
        layout["shares"] = json!([{ "resource": "a.b/c" }]);
        layout[key] = value.clone();
        root.insert("layout".to_owned(), json!([layout]));
    } else {
        let (section, key) = key.split_once('.').expect("a dotted key");
        root.insert(section.to_owned(), json!({ key: value }));
    }
    toml::to_string(&root).expect("TOML")
}

/// Whether the reader may refuse a value that the schema accepts: what takes arithmetic, and what is between
/// keys.
fn is_beyond_the_schema(problem: &str, value: &Value) -> bool {
    let text = value.as_str().unwrap_or_default();
    // A suffix other than `m`, and a share that is rounded down to nothing.
    let odd = text.contains(|c: char| c.is_ascii_alphabetic() && c != 'm')
        || text.ends_with('%') && problem.contains("at least 0.1%");
    let arithmetic = [
        "larger than 9223372036854775807",
        "must be at least 1Mi",
        "must be at least 4Mi",
        "is not a whole number of MiB",
        "bytes; write a unit",
    ];
    let between = [
        "more than one GPU; lower",
        "is longer than compute.",
        "is longer than health.",
        "is of no use without its key",
        "everybody in the network could read",
        "is longer than history.",
    ];
    let grammar = ["is not an address"];
    let is_one = |parts: &[&str]| parts.iter().any(|part| problem.contains(part));
    is_one(&arithmetic)
        || is_one(&between)
        || is_one(&grammar)
        || odd && problem.contains("at most 100%")
}

fn values() -> impl Strategy<Value = Value> {
    // What each form takes, and what is nearly that.
    const QUANTITY: &str =
        r"[-+]?[0-9]{0,4}(\.[0-9]{0,3})?([KMGTPE]iB?|[numkMGTPE]|e[0-9]|E-[0-9]|Mib|B)?";
    const PERCENT: &str = r"[-+]?[0-9]{0,4}(\.[0-9]{0,3})?[mn]? ?%{1,2}";
    let texts = prop_oneof![
        Just(String::new()),
        r"\PC{0,12}",
        QUANTITY,
        PERCENT,
        r"\+?0{0,2}[0-9]{1,5}(ms|s|m|h|d|us)?",
        prop::sample::select(WORDS.split(' ').collect::<Vec<_>>()).prop_map(str::to_owned),
        r"/?[a-z./]{0,20}(tessera|ld\.so\.preload)?/?",
        r"([a-zA-Z0-9]([-a-zA-Z0-9.]{0,6}[a-z0-9])?\.)?(kubernetes\.io|a[b.-]{0,2}c)/[-a-zA-Z0-9_.]{0,8}",
        r":\+?0?[0-9]{1,6}",
        r"(127\.0\.0\.|300\.1\.1\.|\[::|\[)[0-9a-f]{1,3}\]?:[0-9]{1,6}",
        r" ?([a-z:]{0,4} ?=)? ?(info|OFF|warn|[0-9]|inof) ?,?([a-z]{0,3}=?debug)?",
    ];
    let scalar = prop_oneof![
        3 => texts.prop_map(Value::from),
        1 => any::<bool>().prop_map(Value::from),
        2 => (-3_i64..400).prop_map(Value::from),
        1 => any::<i64>().prop_map(Value::from),
        1 => (-1.0..3.0).prop_map(Value::from),
    ];
    let keys = prop::sample::select(vec![
        "resource",
        "count",
        "memory",
        "cores",
        "host",
        "container",
        "read_only",
        "79",
        "x",
        "A=B",
        "",
    ]);
    scalar.prop_recursive(2, 8, 3, move |inner| {
        let table =
            prop::collection::hash_map(keys.clone().prop_map(str::to_owned), inner.clone(), 0..3);
        prop_oneof![
            prop::collection::vec(inner, 0..3).prop_map(Value::from),
            table.prop_map(|table| table.into_iter().collect::<Map<_, _>>().into()),
        ]
    })
}

const WORDS: &str = "auto burst strict none packed distributed best reject spread refuse warn allow file env envvar \
    cdi-cri uuid index require prefer off text json ignore until-reset nvidia.com/gpu four 400% * 12Mi 1s";

fn schema_of(key: &str) -> Value {
    let mut schema = schema();
    for part in key.split('.') {
        let (name, is_array) = part.strip_suffix("[]").map_or((part, false), |name| (name, true));
        schema = schema["properties"][name].take();
        if is_array {
            schema = schema["items"].take();
        }
    }
    schema
}

fn agree(key: &str, schema: &Value, value: &Value) -> Result<(), TestCaseError> {
    match (accepts(schema, value), reads(key, value)) {
        (true, Ok(())) | (false, Err(_)) => Ok(()),
        (true, Err(problem)) => {
            prop_assert!(
                is_beyond_the_schema(&problem, value),
                "the schema accepts {key} = {value}, the reader does not: {problem}"
            );
            Ok(())
        }
        (false, Ok(())) => {
            prop_assert!(
                false,
                "the reader accepts {key} = {value}, the schema does not: {schema}"
            );
            Ok(())
        }
    }
}

/// Every key with its schema.
fn all_keys() -> Vec<(String, Value)> {
    rows().into_iter().map(|row| (row.key.clone(), schema_of(&row.key))).collect()
}

proptest! {
    #[test]
    fn schema_and_reader_agree_about_any_value_of_every_key(value in values()) {
        thread_local!(static KEYS: Vec<(String, Value)> = all_keys());
        KEYS.with(|keys| keys.iter().try_for_each(|(key, schema)| agree(key, schema, &value)))?;
    }
}

/// Strings of a pattern, without regard to its anchors.
fn samples(pattern: &str, runner: &mut TestRunner) -> Vec<Value> {
    let pattern = pattern.replace("[^", "[\0").replace(['^', '$'], "").replace("[\0", "[^");
    let strings = string_regex(&pattern).expect("a pattern");
    (0..100).map(|_| strings.new_tree(runner).expect("a string").current().into()).collect()
}

#[test]
fn what_the_schema_describes_is_what_the_reader_takes() {
    let mut runner = TestRunner::deterministic();
    let mut patterns = 0;
    for (key, schema) in all_keys() {
        let mut values = schema["enum"].as_array().cloned().unwrap_or_default();
        if let Some(pattern) = schema["pattern"].as_str() {
            values = samples(pattern, &mut runner);
            patterns += 1;
        }
        for bound in ["minimum", "maximum", "exclusiveMinimum", "multipleOf"]
            .map(|bound| &schema[bound])
            .into_iter()
            .filter_map(Value::as_i64)
        {
            values.extend([bound.into(), bound.saturating_add(1).into(), (bound - 1).into()]);
        }
        for value in values {
            agree(&key, &schema, &value).unwrap();
        }
    }
    assert!(patterns > 30, "{patterns}");
}

#[test]
fn the_schema_accepts_every_default_and_the_commented_files() {
    let schema = schema();
    for text in [commented().as_str(), EXAMPLE] {
        let value: Value = toml::from_str::<toml::Value>(text).unwrap().try_into().unwrap();
        assert!(accepts(&schema, &value), "{text}");
    }
}

#[test]
fn bytes_are_read_as_people_write_them() {
    let size = |value: Value| reads("share.memory", &value);
    for good in ["12GiB", "12Gi", "512MiB", "1e9"] {
        assert_eq!(size(json!(good)), Ok(()), "{good}");
    }
    assert!(size(json!("12GB")).is_err(), "1000³ or 1024³: nobody knows");
    for bare in [json!("12"), json!(12), json!("64Ki")] {
        let why = size(bare.clone()).unwrap_err();
        assert!(why.contains("bytes; write a unit, such as 512Mi or 12Gi"), "{bare}: {why}");
    }
}

// === The documents that follow from the declarations ===

const HEAD: &str = "\
# Configuration

<!-- Written by `tessera config reference`; a test holds the two equal. -->

`tessera serve` reads the TOML file that `--config` names, else `/etc/tessera/config.toml` if there is one. A key that is
left out keeps its default; [config.toml](../config.toml) has all.

- `tessera config check FILE` reports every unknown key and wrong value, with line; where none is, every contradiction,
  also with this machine's GPUs. `tessera config plan FILE` shows what it would change; `tessera config schema` prints a JSON Schema,
  which the chart's contains.
- A running plugin reads its file again when the file changes, on SIGHUP, and by `tessera config reload`. It refuses a
  bad file and keeps the [last good one](shares.md#changing-the-configuration), also over a restart.
- **A change takes effect at once**, for everybody, unless the meaning ends with *For new pods* (running ones keep what they
  have) or *After a restart* of the plugin, which running pods do not notice.
- **Quantities** are Kubernetes': `123Mi` or `123MiB`, `1.5Gi`, `129M`, `129e6`; **times** `500ms`, `10s`, `5m`, `1h`; a **share** of
  a GPU's time is `\"25%\"`, `\"250m\"` or `0.25` GPUs.
";

/// The whole page.
fn reference() -> String {
    let mut page = HEAD.to_owned();
    for section in &Config::keys() {
        let rows = rows_of(section);
        let header = header(&rows[0], section);
        // Writing to a string does not fail.
        let _ = write!(
            page,
            "\n## `{header}`\n\n{}\n\n| Key | May be | Default | Meaning |\n|---|---|---|---|\n",
            section.doc
        );
        for Row { key, accepts, default, required, takes, doc } in rows {
            let default = match (default, required) {
                (Some(text), _) => format!("`{text}`"),
                (None, true) => "required".to_owned(),
                (None, false) => "–".to_owned(),
            };
            let effect = match takes {
                Takes::AtOnce => "",
                Takes::NewPods => " *For new pods.*",
                Takes::Restart => " *After a restart.*",
            };
            let _ = writeln!(page, "| `{key}` | {accepts} | {default} | {doc}{effect} |");
        }
    }
    page
}

fn rows_of(section: &Key<Config>) -> Vec<Row> {
    let mut found = Vec::new();
    section.rows.into_iter().for_each(|rows| rows(section.name, &mut found));
    found
}

/// `[share]` or `[[layout]]`.
fn header(row: &Row, section: &Key<Config>) -> String {
    match row.key.contains("[]") {
        true => format!("[[{}]]", section.name),
        false => format!("[{}]", section.name),
    }
}

const TOML_HEAD: &str = "\
# Tessera's configuration: every key with its default, as `tessera config default` prints it. A key that is left
# out keeps its default. An unknown key or an impossible value is an error (exit status 64); all are reported
# at once, and where there is none, all contradictions.
#
# Quantities are Kubernetes': 123Mi, 129M, 129e6, 1.5Gi, or a plain number. Times are written 500ms, 10s, 5m,
# 1h. A share of a GPU is a percentage, \"25%\".
";

/// `config.toml`: every key with its default and what it means.
fn commented() -> String {
    let mut file = TOML_HEAD.to_owned();
    for section in &Config::keys() {
        let rows = rows_of(section);
        let header = header(&rows[0], section);
        if header.starts_with("[[") {
            let _ = writeln!(file, "\n{}\n#", comment(section.doc));
            for row in rows {
                let text = format!("`{}`: {}. {}", row.key, row.accepts, row.doc);
                let _ = writeln!(file, "{}", comment(&text));
            }
            let lines =
                EXAMPLE.lines().map(|line| format!("# {line}").trim_end().to_owned() + "\n");
            let _ = write!(file, "\n{}", lines.collect::<String>());
            continue;
        }
        let _ = writeln!(file, "\n{}\n{header}", comment(section.doc));
        let mut values = Vec::new();
        (section.values)(&Config::default(), section.name, &mut values);
        for row in rows {
            let (doc, accepts) = (comment(&row.doc), comment(&format!("May be: {}", row.accepts)));
            let _ = writeln!(file, "{doc}\n{accepts}");
            let nested = format!("{}.", row.key);
            let own = values
                .iter()
                .filter(|shown| shown.key == row.key || shown.key.starts_with(&nested));
            for Shown { key, text, .. } in own {
                let _ = writeln!(file, "{} = {text}", &key[section.name.len() + 1..]);
            }
        }
    }
    file
}

/// Markdown as the lines of a comment.
fn comment(markdown: &str) -> String {
    let mut lines = vec![String::from("#")];
    for word in plain(markdown).split_whitespace() {
        if lines.last().is_some_and(|line| line.len() + word.len() >= 110) {
            lines.push(String::from("#"));
        }
        if let Some(line) = lines.last_mut() {
            line.push(' ');
            line.push_str(word);
        }
    }
    lines.join("\n")
}
