mod agreement;

use std::collections::BTreeSet;

use super::*;
use crate::tables::EXAMPLE;

/// Keys of a parsed file as the table names them.
fn names(prefix: &str, value: &toml::Value, found: &mut BTreeSet<String>) {
    let join =
        |key: &str| if prefix.is_empty() { key.to_owned() } else { format!("{prefix}.{key}") };
    match value {
        toml::Value::Table(table) if !rows().iter().any(|row| row.key == prefix) => {
            for (key, value) in table {
                names(&join(key), value, found);
            }
        }
        toml::Value::Array(entries) if entries.iter().any(toml::Value::is_table) => {
            for entry in entries {
                names(&format!("{prefix}[]"), entry, found);
            }
        }
        _ => {
            found.insert(prefix.to_owned());
        }
    }
}

#[test]
fn the_commented_file_and_the_table_have_the_same_keys() {
    let mut file = BTreeSet::new();
    for text in [include_str!("../../../../config.toml"), EXAMPLE] {
        names("", &toml::from_str(text).unwrap(), &mut file);
    }
    let table: BTreeSet<String> = rows().into_iter().map(|row| row.key).collect();
    let missing: Vec<_> = table.symmetric_difference(&file).collect();
    assert!(missing.is_empty(), "in one of config.toml and config/keys only: {missing:?}");
    assert_eq!(table.len(), rows().len(), "each once");
}

#[test]
fn every_default_can_be_written_into_a_file() {
    let lines: Vec<String> = rows()
        .into_iter()
        .filter(|row| !row.key.contains("[]"))
        .filter_map(|row| Some(format!("{} = {}\n", row.key, row.default?)))
        .collect();
    let config = Config::parse(&lines.concat()).unwrap();
    assert_eq!(differences(&config, &Config::default()).len(), 0);
    assert_eq!(Config { source: Config::default().source, ..config }, Config::default());
}

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

#[test]
fn what_takes_a_restart_stays_as_it_was() {
    let running = Config::default();
    let mut config = Config::parse(
        "[share]\nreplicas = 2\n[paths]\npages = \"/elsewhere\"\n[pages]\nsize = \"1Gi\"\n\
         [log]\nformat = \"json\"\n",
    )
    .unwrap();
    keep(&mut config, &running);
    let left: Vec<String> = differences(&running, &config).into_iter().map(|d| d.key).collect();
    assert_eq!(left, ["share.replicas"]);
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

#[test]
fn a_links_words_stay_where_they_are_not_its_targets_name() {
    let plain = crate::table::plain;
    assert_eq!(plain("See [dra.md](dra.md#x)."), "See docs/dra.md.");
    assert_eq!(
        plain("[deploy/README.md](../deploy/README.md#y) has it"),
        "deploy/README.md has it"
    );
    assert_eq!(
        plain("[Observed overhead](internals/plugin.md#z) covers it"),
        "Observed overhead (docs/internals/plugin.md) covers it"
    );
}
