use super::*;
use crate::config::Problem;

fn problems(text: &str) -> Vec<Problem> {
    Config::parse(text).unwrap_err().problems
}

fn places(text: &str) -> Vec<(String, Option<usize>)> {
    problems(text).into_iter().map(|p| (p.key, p.line)).collect()
}

#[test]
fn the_commented_file_equals_the_defaults() {
    let text = include_str!("../../../../config.toml");
    let config = Config::parse(text).unwrap();
    assert_eq!(Config { source: Source::default(), ..config }, Config::default());
}

#[test]
fn the_commented_file_names_every_key() {
    // A key the reader knows and the file lacks would be offered by the error for an unknown one.
    let text = include_str!("../../../../config.toml");
    let table = DeTable::parse(text).unwrap();
    for (section, keys) in table.get_ref().iter() {
        let section = section.get_ref();
        let error = Config::parse(&format!("[{section}]\nqqqqqqqqqqqq = 1")).unwrap_err();
        let known = error.problems[0].message.split_once("known here: ").unwrap().1.to_owned();
        let mut named: Vec<&str> =
            keys.get_ref().as_table().unwrap().keys().map(|key| key.get_ref().as_ref()).collect();
        named.sort_unstable();
        assert_eq!(known, named.join(", "), "[{section}]");
    }
}

#[test]
fn an_empty_file_is_the_defaults() {
    assert_eq!(Config::parse("").unwrap(), Config::default());
}

#[test]
fn all_mistakes_are_told_at_once_with_key_and_line() {
    let text = "\
[resource]
name = \"gpu\"
[share]
replicas = 0
memroy = \"4Gi\"
cores = 25
placement = \"tight\"
[gpus]
reserve = \"12MB\"
[paths]
pages = \"run/pages\"
[nonsense]
";
    let want: Vec<(String, Option<usize>)> = [
        ("resource.name", 2),
        ("share.replicas", 4),
        ("share.memroy", 5),
        ("share.cores", 6),
        ("share.placement", 7),
        ("gpus.reserve", 9),
        ("paths.pages", 11),
        ("nonsense", 12),
    ]
    .map(|(key, line)| (key.to_owned(), Some(line)))
    .to_vec();
    assert_eq!(places(text), want);
}

#[test]
fn a_mistyped_key_is_answered_with_the_likely_one() {
    let found = problems("[share]\nmemroy = 1\n");
    assert_eq!(found[0].message, "unknown key; did you mean `memory`?");
}

#[test]
fn messages_name_file_line_and_key() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("config.toml");
    std::fs::write(&file, "\n\n[log]\nformat = \"xml\"\n").unwrap();
    let error = Config::load(&file).unwrap_err();
    let want = format!("{}:4: log.format: \"xml\" is none of \"text\", \"json\"", file.display());
    assert_eq!(error.to_string(), want);
    let missing = Config::load(&dir.path().join("absent.toml")).unwrap_err();
    assert!(missing.to_string().contains("cannot read"), "{missing}");
}

#[test]
fn syntax_errors_have_a_line() {
    let found = problems("[share]\nreplicas = \n");
    assert_eq!(found[0].line, Some(2), "{found:?}");
    assert_eq!(found[0].key, "");
    // A key given twice.
    assert_eq!(problems("[log]\nfilter = \"a\"\nfilter = \"b\"\n")[0].line, Some(3));
}

#[test]
fn quotas_that_can_never_work_are_refused() {
    let place = |key: &str, line| vec![(key.to_owned(), Some(line))];
    // Smaller than one context.
    assert_eq!(places("[share]\nmemory = \"256Mi\"\n"), place("share.memory", 2));
    assert_eq!(places("[share]\nmemory = 0\n"), place("share.memory", 2));
    // More compute than there is.
    assert_eq!(places("[share]\nreplicas = 4\ncores = \"300m\"\n"), place("share.cores", 3));
    assert_eq!(places("[share]\ncores = 0\n"), place("share.cores", 2));
    // No quota would hold without the shim.
    assert_eq!(places("[container]\ninject = []\n"), place("container.inject", 2));
    assert_eq!(places("[share]\nmemory = \"-1Gi\"\n"), place("share.memory", 2));
}

#[test]
fn quantities_may_be_strings_or_numbers() {
    for (text, want) in [
        ("\"4Gi\"", 4 << 30),
        ("4294967296", 4 << 30),
        ("4_294_967_296", 4 << 30),
        ("\"4294967296\"", 4 << 30),
        ("4.294967296e9", 4 << 30),
    ] {
        let config = Config::parse(&format!("[share]\nmemory = {text}\n")).unwrap();
        assert_eq!(config.share.memory_bytes, Some(want), "{text}");
    }
    for text in ["\"250m\"", "0.25", "\"0.25\"", "\"250e-3\""] {
        let config = Config::parse(&format!("[share]\ncores = {text}\n")).unwrap();
        assert_eq!(config.share.cores_millis, Some(250), "{text}");
    }
}

#[test]
fn mounts_are_checked() {
    let found = problems(
        "[driver]\nmounts = [{ host = \"/a\" }, { host = \"b\", container = \"/b\" },\n\
         { host = \"/a\", container = \"/usr/local/tessera/pages\" }]\n",
    );
    let messages: Vec<_> = found.iter().map(|p| p.message.as_str()).collect();
    assert_eq!(
        messages,
        [
            "each mount needs `host` and `container`",
            "\"b\" must be an absolute path",
            "/usr/local/tessera/pages is Tessera's own; mount elsewhere",
        ]
    );
}

#[test]
fn resource_names_follow_kubernetes() {
    for name in ["tessera.dev/gpu", "a/b", "x-y.example.com/gpu-8g", "nvidia.com/gpu.shared"] {
        assert_eq!(check_resource_name(name), Ok(()), "{name}");
    }
    let long = format!("a.b/{}", "x".repeat(64));
    for name in [
        "",
        "gpu",
        "/gpu",
        "a.b/",
        "A.b/gpu",
        "a..b/gpu",
        "a.b/g/h",
        "a.b/-g",
        "kubernetes.io/gpu",
        &long,
    ] {
        assert!(check_resource_name(name).is_err(), "{name}");
    }
}
