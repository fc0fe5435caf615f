//! The settings of a database's cache, from the parameters of its URI.
//!
//! | parameter | meaning | default |
//! |---|---|---|
//! | `bifolio_memory` | the bound on memory: `64MiB`, `1GiB`, `500000` (bytes) | 64 MiB |
//! | `bifolio_readahead` | the largest window of readahead; 0 for none | that of the cache |
//! | `bifolio_direct` | `auto`, `never`, `require`: past the kernel's page cache | `auto` |

use bifolio::{Cache, CacheBuilder, DirectIo};

/// Settings of one database.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The bound on memory, bytes.
    pub memory_bytes: u64,
    /// The largest window of readahead, bytes; the default of the cache without it.
    pub readahead_bytes: Option<u64>,
    /// Set if transfers bypass the kernel's page cache.
    pub direct: DirectIo,
}

impl Settings {
    /// Reads the parameters; `parameter` returns the value of a name, if the URI has it. The error
    /// names the invalid value.
    pub fn new<'a>(parameter: impl Fn(&str) -> Option<&'a str>) -> Result<Self, String> {
        let size = |name: &str| {
            let read = |value| {
                bytes(value).ok_or_else(|| {
                    format!("{name}={value}: a size is a number of bytes, KiB, MiB or GiB")
                })
            };
            parameter(name).map(read).transpose()
        };
        let direct = match parameter("bifolio_direct") {
            None | Some("auto") => DirectIo::Auto,
            Some("never") => DirectIo::Never,
            Some("require") => DirectIo::Require,
            Some(other) => {
                return Err(format!("bifolio_direct={other}: is auto, never or require"));
            }
        };
        let settings = Self {
            memory_bytes: size("bifolio_memory")?.unwrap_or(64 << 20),
            readahead_bytes: size("bifolio_readahead")?,
            direct,
        };
        settings.builder().validate().map_err(|error| error.to_string())?;
        Ok(settings)
    }

    /// The builder of the cache.
    pub fn builder(&self) -> CacheBuilder {
        let builder = Cache::builder().memory(self.memory_bytes);
        match self.readahead_bytes {
            Some(bytes) => builder.readahead_bytes_max(bytes),
            None => builder,
        }
    }
}

/// A size with or without a unit.
fn bytes(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let shift = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        for (text, expected) in [
            ("500000", Some(500_000)),
            ("64MiB", Some(64 << 20)),
            ("64m", Some(64 << 20)),
            ("1GiB", Some(1 << 30)),
            ("8k", Some(8192)),
            ("", None),
            ("MiB", None),
            ("1.5G", None),
            ("-1", None),
            ("1TiB", None),
            ("99999999999G", None),
        ] {
            assert_eq!(bytes(text), expected, "{text}");
        }
    }

    #[test]
    fn a_wrong_parameter_is_named() {
        let wrong = |wrong: &'static str, value: &'static str| {
            Settings::new(|name| (name == wrong).then_some(value)).unwrap_err()
        };
        assert!(wrong("bifolio_memory", "much").contains("bifolio_memory=much"));
        assert!(wrong("bifolio_memory", "1").contains("memory"));
        assert!(wrong("bifolio_direct", "yes").contains("bifolio_direct=yes"));
        let defaults = Settings::new(|_| None).unwrap();
        assert_eq!(defaults.memory_bytes, 64 << 20);
    }
}
