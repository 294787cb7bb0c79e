//! `docs/api.schema.json` is made of the view's types, and what `docs/api.md` shows is in it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use schemars::{JsonSchema, SchemaGenerator};
use serde_json::{Map, Value, json};
use tessera_view::change::{
    Call, CordonRequest, PlanRequest, ReloadRequest, ResetQuotaRequest, SetQuotaRequest,
    UncordonRequest,
};
use tessera_view::{Problem, advice, explain, fleet, history, status, trace};
use tessera_web::Route;

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(name)
}

/// The type that a route answers.
fn answer(route: Route, generator: &mut SchemaGenerator) -> Value {
    fn of<T: JsonSchema>(generator: &mut SchemaGenerator) -> Value {
        generator.subschema_for::<T>().to_value()
    }
    match route {
        Route::Fleet => of::<fleet::Fleet>(generator),
        Route::History => of::<history::Answer>(generator),
        Route::Recommend => of::<advice::Recommendations>(generator),
        Route::Waste => of::<advice::Waste>(generator),
        Route::Trace => of::<trace::Trace>(generator),
        // An event's data: all, or the entries that changed.
        Route::Stream => {
            let (all, some) = (of::<fleet::Fleet>(generator), of::<Vec<fleet::Entry>>(generator));
            json!({ "anyOf": [all, some, of::<Problem>(generator)] })
        }
        // Where several nodes know the subject, each with its own.
        Route::Explain => {
            let one = of::<explain::Explanation>(generator);
            json!({ "anyOf": [one, of::<explain::Explanations>(generator)] })
        }
        Route::Schema => json!({ "type": "object" }),
    }
}

/// What is posted by root, and what comes back.
fn call<C: Call + JsonSchema>(
    posted: &mut Map<String, Value>,
    answers: &mut Map<String, Value>,
    generator: &mut SchemaGenerator,
) where
    C::Answer: JsonSchema,
{
    posted.insert(C::PATH.to_owned(), generator.subschema_for::<C>().to_value());
    answers.insert(C::PATH.to_owned(), generator.subschema_for::<C::Answer>().to_value());
}

fn schema() -> Value {
    let mut generator = SchemaGenerator::default();
    let mut paths = Map::new();
    for route in Route::ALL {
        paths.insert(route.path().to_owned(), answer(route, &mut generator));
    }
    let mut posted = Map::new();
    call::<SetQuotaRequest>(&mut posted, &mut paths, &mut generator);
    call::<ResetQuotaRequest>(&mut posted, &mut paths, &mut generator);
    call::<CordonRequest>(&mut posted, &mut paths, &mut generator);
    call::<UncordonRequest>(&mut posted, &mut paths, &mut generator);
    call::<PlanRequest>(&mut posted, &mut paths, &mut generator);
    call::<ReloadRequest>(&mut posted, &mut paths, &mut generator);
    let whole = generator.subschema_for::<status::Status>().to_value();
    paths.insert(status::STATUS.to_owned(), whole);
    let error = generator.subschema_for::<Problem>().to_value();
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Tessera's JSON API, tessera.dev/v1",
        "description": "Answers by path, what is posted by path (at root's socket alone), and that of every status from 400 on. A reader ignores fields that it does not know.",
        "properties": paths,
        "posted": posted,
        "error": error,
        "$defs": generator.take_definitions(true),
    })
}

#[test]
fn the_schema_is_that_of_the_types() {
    let now = format!("{:#}\n", schema());
    if std::env::var_os("TESSERA_REGENERATE").is_some() {
        std::fs::write(file("api.schema.json"), &now).unwrap();
    }
    let kept = std::fs::read_to_string(file("api.schema.json")).unwrap();
    assert!(
        kept == now,
        "docs/api.schema.json is old: TESSERA_REGENERATE=1 cargo test -p tessera-web --test server"
    );
}

/// The names of all fields of an answer, and of all that is in it.
fn fields(schema: &Value, all: &Value, names: &mut BTreeSet<String>) {
    if let Some(name) = schema["$ref"].as_str() {
        return fields(&all["$defs"][name.trim_start_matches("#/$defs/")], all, names);
    }
    for (name, field) in schema["properties"].as_object().into_iter().flatten() {
        names.insert(name.clone());
        fields(field, all, names);
    }
    let parts = ["anyOf", "allOf"].map(|key| schema[key].as_array());
    let parts = parts.into_iter().flatten().flatten().chain(schema.get("items"));
    parts.for_each(|part| fields(part, all, names));
}

#[test]
fn every_recipe_and_every_route_of_the_page_is_there() {
    let text = std::fs::read_to_string(file("api.md")).unwrap();
    for route in Route::ALL {
        assert!(text.contains(&format!("`{}", route.path())), "docs/api.md lacks {}", route.path());
    }
    let all = schema();
    let mut seen = 0;
    for (question, recipe) in text.lines().filter_map(|line| line.split_once("| jq ")) {
        let route = Route::ALL.into_iter().rfind(|route| question.contains(route.path())).unwrap();
        let mut known = BTreeSet::new();
        fields(&all["properties"][route.path()], &all, &mut known);
        let recipe = recipe.split('\'').nth(1).unwrap_or_else(|| panic!("{recipe}"));
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
        for word in recipe.split('.').skip(1) {
            let name = word.split(|c| !is_name(c)).next().unwrap_or_default();
            assert!(name.is_empty() || known.contains(name), "{recipe}: no {name} in {known:?}");
            seen += 1;
        }
    }
    assert!(seen > 10, "{seen} fields in recipes");
}
