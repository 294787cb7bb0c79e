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

/// Bytes in memory for each byte of text in an answer of Kubernetes: objects leave most of their fields out.
pub(crate) const KUBERNETES: usize = 16;
/// Bytes in memory that any text may take.
const FREE: usize = 64 << 10;
/// No figure is larger: seconds of thirty million years, or a cost in any currency.
const LARGEST: f64 = 1e15;

/// Reads a text, which may take `times` as many bytes in memory.
///
/// # Errors
/// It is no JSON of this type, it is out of proportion, or a figure is none that can be measured.
pub fn read<T: DeserializeOwned>(text: &[u8], times: usize) -> serde_json::Result<T> {
    read_part(text, times, &mut { usize::MAX })
}

/// As [`read`], for a text that is one of several: `left` is what all of them may still take in memory, in bytes, and
/// 0 where this one took too much.
pub(crate) fn read_part<T: DeserializeOwned>(
    text: &[u8],
    times: usize,
    left: &mut usize,
) -> serde_json::Result<T> {
    let most = text.len().saturating_mul(times).saturating_add(FREE).min(*left);
    let meter = Meter { left: Cell::new(most) };
    let mut json = serde_json::Deserializer::from_slice(text);
    let value = T::deserialize(Metered { inner: &mut json, meter: &meter });
    *left -= most - meter.left.get();
    let value = value?;
    json.end()?;
    Ok(value)
}

/// What may still be taken.
struct Meter {
    left: Cell<usize>,
}

impl Meter {
    fn take<E: Error>(&self, bytes: usize) -> Result<(), E> {
        let left = self.left.get().checked_sub(bytes);
        self.left.set(left.unwrap_or_default());
        left.map(drop)
            .ok_or_else(|| E::custom("it has far more entries than text: most of them are empty"))
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

    #[test]
    fn what_one_part_takes_the_next_ones_have_less() {
        let text = format!("[{}]", vec!["\"0123456789\""; 1000].join(","));
        let mut left = 100_000;
        let takes = 1000 * (size_of::<String>() + 10);
        for part in 1..=2 {
            let read = read_part::<Vec<String>>(text.as_bytes(), KUBERNETES, &mut left).unwrap();
            // The end of a list is asked for like an element.
            assert_eq!((read.len(), left), (1000, 100_000 - part * (takes + size_of::<String>())));
        }
        let faulty = read_part::<Vec<String>>(b"[1]", KUBERNETES, &mut left);
        assert!(faulty.is_err() && left > 0, "{left}");
        read_part::<Vec<String>>(text.as_bytes(), KUBERNETES, &mut left).unwrap_err();
        assert_eq!(left, 0);
    }
}
