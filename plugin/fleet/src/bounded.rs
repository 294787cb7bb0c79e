//! JSON of a stranger, read within bounds: what is read takes no more memory than a small multiple of its text, and
//! every figure is one that can be measured. Pure, and the same for every type.
//!
//! A list of three million `{}` is a text of 8 MiB and several GiB of default values. So each element counts with its
//! size in memory while it is read, and reading ends where the sum passes what a text of that length may take.

use std::cell::Cell;
use std::fmt;

use serde::de::{
    DeserializeOwned, DeserializeSeed, Deserializer, EnumAccess, Error, MapAccess, SeqAccess,
    Visitor,
};

/// Bytes in memory for each byte of text: an answer of a plugin has names for all its figures, and takes one or two.
const TIMES: usize = 4;
/// Bytes in memory that any text may take.
const FREE: usize = 64 << 10;
/// No figure is larger: seconds of thirty million years, or a cost in any currency.
const LARGEST: f64 = 1e15;

/// Reads a text.
///
/// # Errors
/// It is no JSON of this type, it is out of proportion, or a figure is none that can be measured.
pub(crate) fn read<T: DeserializeOwned>(text: &[u8]) -> serde_json::Result<T> {
    let meter = Meter { left: Cell::new(text.len().saturating_mul(TIMES).saturating_add(FREE)) };
    let mut json = serde_json::Deserializer::from_slice(text);
    let value = T::deserialize(Metered { inner: &mut json, meter: &meter })?;
    json.end()?;
    Ok(value)
}

/// What may still be taken.
struct Meter {
    left: Cell<usize>,
}

impl Meter {
    fn take<E: Error>(&self, bytes: usize) -> Result<(), E> {
        let left = self.left.get().checked_sub(bytes).ok_or_else(|| {
            E::custom("it has far more entries than text: most of them are empty")
        })?;
        self.left.set(left);
        Ok(())
    }
}

/// A deserialiser, a visitor, a seed or an access, with the meter on everything that passes.
struct Metered<'m, T> {
    inner: T,
    meter: &'m Meter,
}

/// A visitor of a figure with a fraction.
struct Figure<V>(V);

impl<V> Figure<V> {
    fn sound<E: Error>(figure: f64) -> Result<f64, E> {
        match (0.0..=LARGEST).contains(&figure) {
            true => Ok(figure),
            false => Err(E::custom(format!("the figure {figure:e} is not from 0 to {LARGEST:e}"))),
        }
    }
}

#[allow(clippy::cast_precision_loss, reason = "as f64 reads whole numbers itself")]
impl<'de, V: Visitor<'de>> Visitor<'de> for Figure<V> {
    type Value = V::Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.expecting(f)
    }

    fn visit_f64<E: Error>(self, figure: f64) -> Result<V::Value, E> {
        self.0.visit_f64(Self::sound(figure)?)
    }

    fn visit_u64<E: Error>(self, figure: u64) -> Result<V::Value, E> {
        Self::sound::<E>(figure as f64)?;
        self.0.visit_u64(figure)
    }

    fn visit_i64<E: Error>(self, figure: i64) -> Result<V::Value, E> {
        Self::sound::<E>(figure as f64)?;
        self.0.visit_i64(figure)
    }
}

macro_rules! pass {
    ($($method:ident($($name:ident: $type:ty),*);)*) => {
        $(fn $method<V: Visitor<'de>>(self, $($name: $type,)* visitor: V) -> Result<V::Value, D::Error> {
            self.inner.$method($($name,)* Metered { inner: visitor, meter: self.meter })
        })*
    };
}

impl<'de, D: Deserializer<'de>> Deserializer<'de> for Metered<'_, D> {
    type Error = D::Error;

    pass! {
        deserialize_any();
        deserialize_bool();
        deserialize_i8();
        deserialize_i16();
        deserialize_i32();
        deserialize_i64();
        deserialize_u8();
        deserialize_u16();
        deserialize_u32();
        deserialize_u64();
        deserialize_char();
        deserialize_str();
        deserialize_string();
        deserialize_bytes();
        deserialize_byte_buf();
        deserialize_option();
        deserialize_unit();
        deserialize_unit_struct(name: &'static str);
        deserialize_newtype_struct(name: &'static str);
        deserialize_seq();
        deserialize_tuple(len: usize);
        deserialize_tuple_struct(name: &'static str, len: usize);
        deserialize_map();
        deserialize_struct(name: &'static str, fields: &'static [&'static str]);
        deserialize_enum(name: &'static str, variants: &'static [&'static str]);
        deserialize_identifier();
        deserialize_ignored_any();
    }

    fn deserialize_f32<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.inner.deserialize_f32(Figure(visitor))
    }

    fn deserialize_f64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.inner.deserialize_f64(Figure(visitor))
    }
}

impl<'de, V: Visitor<'de>> Visitor<'de> for Metered<'_, V> {
    type Value = V::Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.expecting(f)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<V::Value, E> {
        self.inner.visit_bool(value)
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<V::Value, E> {
        self.inner.visit_i64(value)
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<V::Value, E> {
        self.inner.visit_u64(value)
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<V::Value, E> {
        self.inner.visit_f64(value)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<V::Value, E> {
        self.meter.take(text.len())?;
        self.inner.visit_str(text)
    }

    fn visit_borrowed_str<E: Error>(self, text: &'de str) -> Result<V::Value, E> {
        self.meter.take(text.len())?;
        self.inner.visit_borrowed_str(text)
    }

    fn visit_none<E: Error>(self) -> Result<V::Value, E> {
        self.inner.visit_none()
    }

    fn visit_unit<E: Error>(self) -> Result<V::Value, E> {
        self.inner.visit_unit()
    }

    fn visit_some<D: Deserializer<'de>>(self, inner: D) -> Result<V::Value, D::Error> {
        self.inner.visit_some(Metered { inner, meter: self.meter })
    }

    fn visit_newtype_struct<D: Deserializer<'de>>(self, inner: D) -> Result<V::Value, D::Error> {
        self.inner.visit_newtype_struct(Metered { inner, meter: self.meter })
    }

    fn visit_seq<A: SeqAccess<'de>>(self, inner: A) -> Result<V::Value, A::Error> {
        self.inner.visit_seq(Metered { inner, meter: self.meter })
    }

    fn visit_map<A: MapAccess<'de>>(self, inner: A) -> Result<V::Value, A::Error> {
        self.inner.visit_map(Metered { inner, meter: self.meter })
    }

    fn visit_enum<A: EnumAccess<'de>>(self, access: A) -> Result<V::Value, A::Error> {
        // No view has an enum with content: nothing in one is counted.
        self.inner.visit_enum(access)
    }
}

impl<'de, S: DeserializeSeed<'de>> DeserializeSeed<'de> for Metered<'_, S> {
    type Value = S::Value;

    fn deserialize<D: Deserializer<'de>>(self, inner: D) -> Result<S::Value, D::Error> {
        self.inner.deserialize(Metered { inner, meter: self.meter })
    }
}

impl<'de, A: SeqAccess<'de>> SeqAccess<'de> for Metered<'_, A> {
    type Error = A::Error;

    fn next_element_seed<S: DeserializeSeed<'de>>(
        &mut self,
        inner: S,
    ) -> Result<Option<S::Value>, A::Error> {
        self.meter.take(size_of::<S::Value>())?;
        self.inner.next_element_seed(Metered { inner, meter: self.meter })
    }
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for Metered<'_, A> {
    type Error = A::Error;

    fn next_key_seed<S: DeserializeSeed<'de>>(
        &mut self,
        inner: S,
    ) -> Result<Option<S::Value>, A::Error> {
        // A field's name is a number in memory, a map's key is a text.
        self.meter.take(size_of::<S::Value>())?;
        self.inner.next_key_seed(Metered { inner, meter: self.meter })
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, inner: S) -> Result<S::Value, A::Error> {
        self.meter.take(size_of::<S::Value>())?;
        self.inner.next_value_seed(Metered { inner, meter: self.meter })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde::Serialize;
    use serde_json::{Value, json};
    use tessera_view::advice::{Recommendations, Waste};
    use tessera_view::explain::Explanation;
    use tessera_view::{fleet, history};

    /// Whether what is read is no larger than in proportion to its text. What it is as JSON again stands for memory:
    /// each value takes at least its name there.
    fn kept<T: DeserializeOwned + Serialize>(text: &str) -> Result<bool, String> {
        let value: T = read(text.as_bytes()).map_err(|error| error.to_string())?;
        let again = serde_json::to_vec(&value).unwrap().len();
        assert!(again < 8 * text.len() + (256 << 10), "{} became {again}", text.len());
        Ok(true)
    }

    /// Every list of every answer, by the way to it.
    const LISTS: [&str; 31] = [
        "nodes",
        "nodes.view.gpus",
        "nodes.view.tenants",
        "nodes.view.others",
        "nodes.view.warnings",
        "nodes.view.gpus.replicas",
        "nodes.view.gpus.fits",
        "nodes.view.tenants.gpus",
        "nodes.view.tenants.other_holders",
        "nodes.view.plugin.amiss",
        "gpus",
        "gpus.points",
        "tenants",
        "tenants.points",
        "events",
        "remarks",
        "workloads",
        "workloads.pods",
        "workloads.evidence",
        "workloads.changes",
        "namespaces",
        "namespaces.tenants",
        "allocations",
        "allocations.trail",
        "allocations.limits",
        "allocations.incidents",
        "allocations.now.gpus",
        "allocations.now.processes",
        "allocations.placement.stands",
        "gpus.trail",
        "gpus.gpu.replicas",
    ];

    /// An answer with so many of `element` in the list at `path`; the lists on the way have one element.
    fn flood(path: &str, element: &str, count: usize) -> String {
        let single = ["view", "plugin", "now", "placement", "gpu"];
        let mut text = format!("[{}]", vec![element; count].join(","));
        let mut names: Vec<&str> = path.split('.').collect();
        while let Some(name) = names.pop() {
            let parent = names.last().copied();
            text = format!("{{\"{name}\":{text}}}");
            if parent.is_some_and(|parent| !single.contains(&parent)) {
                text = format!("[{text}]");
            }
        }
        text
    }

    #[test]
    fn no_list_of_any_answer_grows_out_of_proportion() {
        let mut refused = 0;
        for path in LISTS {
            for element in ["{}", "\"\""] {
                let text = flood(path, element, 100_000);
                let all = [
                    kept::<fleet::Fleet>(&text),
                    kept::<history::Answer>(&text),
                    kept::<Explanation>(&text),
                    kept::<Recommendations>(&text),
                    kept::<Waste>(&text),
                ];
                let sentence = |one: &Result<bool, String>| matches!(one, Err(error) if error.contains("more entries than text"));
                refused += all.iter().filter(|one| sentence(one)).count();
            }
        }
        assert!(refused >= LISTS.len(), "{refused}");
    }

    #[test]
    fn a_full_node_is_read() {
        let used = json!({ "gpu_uuid": "GPU-0" });
        let tenant = json!({ "id": "3f2a", "namespace": "a", "pod": "b", "gpus": [used] });
        let gpu = json!({ "uuid": "GPU-0", "replicas": [{ "count": 64 }], "fits": [{}] });
        let view = json!({ "gpus": vec![gpu; 16], "tenants": vec![tenant; 16 * 64] });
        let short = json!({ "nodes": [{ "view": view }] }).to_string();
        let whole: fleet::Fleet = serde_json::from_str(&short).unwrap();
        // As a plugin writes it, with every field.
        let text = serde_json::to_string(&whole).unwrap();
        assert_eq!(read::<fleet::Fleet>(text.as_bytes()).unwrap(), whole);
        assert!(text.len() < crate::ask::LARGEST_VIEW / 2, "{}", text.len());
    }

    #[test]
    fn figures_that_nothing_measures_are_refused() {
        let read = |figure: &str| {
            let text = format!(r#"{{"price_per_gpu_hour":{figure}}}"#);
            super::read::<Waste>(text.as_bytes()).map_err(|error| error.to_string())
        };
        for figure in ["1e308", "-1e308", "-1", "-0.5", "1e400", "99999999999999999999", "null"] {
            assert!(read(figure).is_err(), "{figure}");
        }
        for figure in ["0", "0.0", "2.5", "7", "1e15", "1e-300"] {
            assert!(read(figure).is_ok(), "{figure}: {:?}", read(figure));
        }
        // What is optional is a figure too.
        let idle = r#"{"namespaces":[{"tenants":[{"idle_seconds":-1e9}]}]}"#;
        assert!(super::read::<Waste>(idle.as_bytes()).is_err());
    }

    /// Any JSON with the names of the views.
    fn anything() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            ".{0,8}".prop_map(Value::from),
        ];
        let names = LISTS.iter().flat_map(|path| path.split('.')).collect::<Vec<_>>();
        leaf.prop_recursive(5, 64, 8, move |inner| {
            let name = proptest::sample::select(names.clone()).prop_map(str::to_owned);
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..8).prop_map(Value::from),
                prop::collection::vec((name, inner), 0..6)
                    .prop_map(|all| Value::Object(all.into_iter().collect())),
            ]
        })
    }

    proptest! {
        /// Whatever is read is what it is without bounds.
        #[test]
        fn bounds_change_nothing_that_they_let_pass(value in anything()) {
            let text = value.to_string();
            if let Ok(bounded) = read::<history::Answer>(text.as_bytes()) {
                prop_assert_eq!(bounded, serde_json::from_str::<history::Answer>(&text).unwrap());
            }
            if let Ok(bounded) = read::<Explanation>(text.as_bytes()) {
                prop_assert_eq!(bounded, serde_json::from_str::<Explanation>(&text).unwrap());
            }
        }
    }
}
