//! The settings of a database, from the parameters of its URI.
//!
//! | parameter | meaning | default |
//! |---|---|---|
//! | `bifolio_memory` | bound of a cache of its own: `64MiB`, `500000` | that of the process |
//! | `bifolio_readahead` | largest readahead window of that cache, or 0 | that of a cache |
//! | `bifolio_direct` | `auto`, `never`, `require`: past the kernel's page cache | `auto` |
//! | `bifolio_class` | name of the class of the database in its cache | none |
//! | `bifolio_floor` | memory that others cannot take from that class | as it is, or 0 |
//! | `bifolio_ceiling` | the most memory that pages of that class have | as it is, or the bound |
//! | `bifolio_exclusive` | 1: other processes are kept out | 0, or `BIFOLIO_EXCLUSIVE` |

use crate::process_cache;
use bifolio::{Cache, CacheBuilder, DirectIo, OpenOptions};

/// Bound on memory of the cache of the process if nothing else is asked for and the process may
/// have [`DEFAULT_DIVISOR`] times as much, bytes.
const MEMORY_BYTES: u64 = 64 << 20;
/// Part of the memory that the process may have, which the default bound does not exceed: SQLite,
/// the program and the kernel's pages of journals and logs need the rest.
const DEFAULT_DIVISOR: u64 = 4;
/// Part of a bound that the cache of the process keeps while memory is short.
const FLOOR_DIVISOR: u64 = 4;
/// The smallest bound of a cache, bytes.
const BOUND_MIN: u64 = 256 << 10;
/// Memory that a bound leaves of what the process may have, bytes: without it the process would be
/// killed as soon as the cache is full.
const REST_BYTES: u64 = 8 << 20;

/// Parameter of SQLite that has it read a file without a lock, since nothing changes it.
const IMMUTABLE: &str = "immutable";
/// Parameter of SQLite that has it lock nothing.
const NO_LOCK: &str = "nolock";

/// The variable of the environment that keeps other processes out if it is 1.
const EXCLUSIVE_VARIABLE: &str = "BIFOLIO_EXCLUSIVE";

/// Settings of one database; what the URI does not give is `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Settings {
    /// Bound on memory of a cache of its own, bytes.
    memory_bytes: Option<u64>,
    /// Largest window of readahead, bytes.
    readahead_bytes: Option<u64>,
    /// Transfers past the kernel's page cache.
    direct: Option<DirectIo>,
    /// Name of the class of the database, and its floor and ceiling, bytes.
    class: Option<String>,
    floor_bytes: Option<u64>,
    ceiling_bytes: Option<u64>,
    /// Other processes are kept out.
    is_exclusive: Option<bool>,
    /// The parameter by which SQLite takes no lock.
    without_lock: Option<&'static str>,
}

impl Settings {
    /// Reads the parameters of a URI. The error names the one that is wrong.
    pub(crate) fn new<'a>(
        parameters: impl Iterator<Item = (&'a str, &'a str)>,
    ) -> Result<Self, String> {
        let mut settings = Self::default();
        for (key, value) in parameters {
            match key {
                "bifolio_memory" => settings.memory_bytes = Some(bound(key, value)?),
                "bifolio_readahead" => settings.readahead_bytes = Some(size(key, value)?),
                "bifolio_direct" => settings.direct = Some(direct(value)?),
                "bifolio_class" => settings.class = Some(value.to_owned()),
                "bifolio_floor" => settings.floor_bytes = Some(size(key, value)?),
                "bifolio_ceiling" => settings.ceiling_bytes = Some(size(key, value)?),
                "bifolio_exclusive" => settings.is_exclusive = Some(is_true(value)),
                _ if key.starts_with("bifolio_") => {
                    return Err(format!(
                        "{key}: no such parameter; there are bifolio_memory, bifolio_readahead, \
                         bifolio_direct, bifolio_class, bifolio_floor, bifolio_ceiling and \
                         bifolio_exclusive"
                    ));
                }
                IMMUTABLE if is_true(value) => settings.without_lock = Some(IMMUTABLE),
                NO_LOCK if is_true(value) => settings.without_lock = Some(NO_LOCK),
                _ => {}
            }
        }
        match settings.own_cache() {
            Some(builder) => builder.validate().map_err(|error| error.to_string())?,
            None if settings.readahead_bytes.is_some() => {
                return Err("bifolio_readahead: is a setting of a cache of its own, which \
                            bifolio_memory gives to a database"
                    .to_owned());
            }
            None => {}
        }
        if settings.class.is_none() && settings.floor_bytes.or(settings.ceiling_bytes).is_some() {
            return Err("bifolio_floor and bifolio_ceiling: are settings of a class, which \
                        bifolio_class names"
                .to_owned());
        }
        Ok(settings)
    }

    /// Returns the cache of the process, or a new one if the database has a bound of its own, with
    /// the class of the database. The error says why it cannot be built, or the class be set.
    pub(crate) fn cache(&self) -> Result<Cache, String> {
        let cache = match self.own_cache() {
            Some(builder) => builder.build().map_err(|error| error.to_string())?,
            None => process_cache::get()?,
        };
        self.set_class(&cache).map_err(|error| error.to_string())?;
        Ok(cache)
    }

    /// Makes the class of the database, and sets the limits that the URI gives.
    fn set_class(&self, cache: &Cache) -> bifolio::Result<()> {
        let Some(name) = &self.class else { return Ok(()) };
        let class = cache.class(name)?;
        if let Some(bytes) = self.ceiling_bytes {
            class.set_ceiling(Some(bytes))?;
        }
        self.floor_bytes.map_or(Ok(()), |bytes| class.set_floor(bytes))
    }

    /// Returns the options of the database's file in the cache.
    pub(crate) fn options(&self) -> OpenOptions {
        let options = OpenOptions::new();
        match &self.class {
            Some(name) => options.class(name),
            None => options,
        }
    }

    /// Returns `true` if the database has a cache of its own, which keeps nothing after its close.
    pub(crate) fn has_own_cache(&self) -> bool {
        self.memory_bytes.is_some()
    }

    /// Returns the builder of a cache of its own, if the database has one.
    fn own_cache(&self) -> Option<CacheBuilder> {
        let builder = Cache::builder().memory(self.memory_bytes?);
        Some(match self.readahead_bytes {
            Some(bytes) => builder.readahead_max(bytes),
            None => builder,
        })
    }

    /// Returns whether other processes are kept out of a database that is not open in this one.
    pub(crate) fn is_exclusive(&self) -> bool {
        let is_set = || std::env::var_os(EXCLUSIVE_VARIABLE).is_some_and(|value| value == "1");
        self.is_exclusive.unwrap_or_else(is_set)
    }

    /// Returns `true` if SQLite reads without a lock, since nothing changes the file.
    pub(crate) fn is_immutable(&self) -> bool {
        self.without_lock == Some(IMMUTABLE)
    }

    /// Checks that a connection to a database which is exclusive or not, as others in this process
    /// have it open or as `self` says, asks for nothing else.
    pub(crate) fn check_exclusive(&self, is_exclusive: bool) -> Result<(), String> {
        if let Some(parameter) = self.without_lock.filter(|_| is_exclusive) {
            return Err(format!(
                "{parameter}=1: an exclusive database has a lock; open it without \
                 bifolio_exclusive=1, or with mode=ro"
            ));
        }
        match self.is_exclusive {
            Some(asked) if asked != is_exclusive => Err(format!(
                "bifolio_exclusive={}: the database is open in this process with \
                 bifolio_exclusive={}",
                i32::from(asked),
                i32::from(is_exclusive)
            )),
            _ => Ok(()),
        }
    }

    pub(crate) fn direct(&self) -> DirectIo {
        self.direct.unwrap_or(DirectIo::Auto)
    }

    /// Checks that a database with these settings is what a further connection asks for, which may
    /// leave them out.
    pub(crate) fn check_joined_with(&self, asked: &Self) -> Result<(), String> {
        if let Some(other_bytes) =
            asked.memory_bytes.filter(|_| asked.memory_bytes != self.memory_bytes)
        {
            let open = match self.memory_bytes {
                Some(bytes) => format!("with bifolio_memory={bytes}"),
                None => "without a cache of its own".to_owned(),
            };
            return Err(format!(
                "bifolio_memory={other_bytes}: the database is open in this process {open}"
            ));
        }
        if let Some(other) = asked.class.as_ref().filter(|_| asked.class != self.class) {
            let open = self.class.as_ref();
            let open = open.map_or_else(|| "in no class".to_owned(), |it| format!("in `{it}`"));
            return Err(format!(
                "bifolio_class={other}: the database is open in this process {open}"
            ));
        }
        let differs =
            asked.readahead_bytes.is_some_and(|_| asked.readahead_bytes != self.readahead_bytes)
                || asked.direct.is_some_and(|direct| direct != self.direct());
        if differs {
            return Err("bifolio_readahead or bifolio_direct: the database is open in this \
                        process with other values"
                .to_owned());
        }
        Ok(())
    }
}

fn direct(value: &str) -> Result<DirectIo, String> {
    match value {
        "auto" => Ok(DirectIo::Auto),
        "never" => Ok(DirectIo::Never),
        "require" => Ok(DirectIo::Require),
        _ => Err(format!("bifolio_direct={value}: is auto, never or require")),
    }
}

pub(crate) fn size(key: &str, value: &str) -> Result<u64, String> {
    let problem = || format!("{key}={value}: a size is a number of bytes, KiB, MiB or GiB");
    bytes(value).ok_or_else(problem)
}

/// Returns the default bound.
pub(crate) fn default_bound() -> u64 {
    default_bound_in(bifolio::memory_allowed())
}

/// Returns the default bound while memory is short of a cache with the bound `memory_bytes`.
pub(crate) fn default_floor(memory_bytes: u64) -> u64 {
    (memory_bytes / FLOOR_DIVISOR).max(BOUND_MIN.min(memory_bytes))
}

fn default_bound_in(allowed_bytes: u64) -> u64 {
    MEMORY_BYTES.min(allowed_bytes / DEFAULT_DIVISOR)
}

/// Reads a bound on memory, which leaves a rest of what the process may have.
pub(crate) fn bound(key: &str, value: &str) -> Result<u64, String> {
    let bytes = size(key, value)?;
    let allowed_bytes = bifolio::memory_allowed();
    if bytes <= bound_max_in(allowed_bytes) {
        return Ok(bytes);
    }
    Err(format!(
        "{key}={value}: this process may have {allowed_bytes} bytes of memory (the machine's, or \
         the limit of its control group), of which a cache leaves {REST_BYTES}: it would be killed"
    ))
}

fn bound_max_in(allowed_bytes: u64) -> u64 {
    allowed_bytes.saturating_sub(REST_BYTES).max(allowed_bytes / 2)
}

/// Reads a boolean as SQLite does in a URI.
pub(crate) fn is_true(value: &str) -> bool {
    let digits = value.trim_end_matches(|letter: char| !letter.is_ascii_digit());
    match digits.parse::<u64>() {
        Ok(number) => number != 0,
        Err(_) => ["on", "yes", "true"].iter().any(|yes| value.eq_ignore_ascii_case(yes)),
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
    fn bounds_fit_into_what_the_process_may_have() {
        const MIB: u64 = 1 << 20;
        for (allowed, default, max) in [(64, 16, 56), (8, 2, 4), (1024, 64, 1016)] {
            assert_eq!(default_bound_in(allowed * MIB), default * MIB);
            assert_eq!(bound_max_in(allowed * MIB), max * MIB);
        }
        let problem = bound("bifolio_memory", "1000000GiB").unwrap_err();
        assert!(problem.contains("bifolio_memory=1000000GiB: this process may have"), "{problem}");
    }

    fn parse(uri: &'static str) -> Result<Settings, String> {
        Settings::new(uri.split('&').filter_map(|pair| pair.split_once('=')))
    }

    #[test]
    fn a_wrong_parameter_is_named() {
        for (uri, part) in [
            ("bifolio_memory=much", "bifolio_memory=much"),
            ("bifolio_memory=1", "memory"),
            ("bifolio_direct=yes", "bifolio_direct=yes"),
            ("mode=ro&bifolio_memry=1MiB", "bifolio_memry"),
            ("bifolio_readahead=0", "bifolio_memory"),
            ("bifolio_floor=1MiB", "bifolio_class"),
            ("bifolio_class=a&bifolio_ceiling=x", "bifolio_ceiling=x"),
        ] {
            let problem = parse(uri).unwrap_err();
            assert!(problem.contains(part), "{uri}: {problem}");
        }
        assert_eq!(parse("mode=ro&nolock=0&immutable=off&cache=shared"), Ok(Settings::default()));
        for parameter in ["immutable=1", "nolock=1"] {
            let settings = parse(parameter).unwrap();
            assert_eq!(settings.check_exclusive(false), Ok(()));
            let problem = settings.check_exclusive(true).unwrap_err();
            assert!(problem.starts_with(parameter), "{problem}");
        }
    }

    #[test]
    fn a_further_connection_asks_for_the_same_or_for_nothing() {
        let open = parse("bifolio_memory=8MiB&bifolio_direct=never").unwrap();
        for same in ["", "bifolio_memory=8192KiB", "bifolio_direct=never"] {
            assert_eq!(open.check_joined_with(&parse(same).unwrap()), Ok(()));
        }
        for other in [
            "bifolio_memory=64MiB",
            "bifolio_direct=auto",
            "bifolio_memory=8MiB&bifolio_readahead=0",
        ] {
            assert!(open.check_joined_with(&parse(other).unwrap()).is_err(), "{other}");
        }
        let open = parse("").unwrap();
        assert!(open.check_joined_with(&parse("bifolio_memory=64MiB").unwrap()).is_err());
        let problem = open.check_joined_with(&parse("bifolio_class=a").unwrap()).unwrap_err();
        assert!(problem.contains("in no class"), "{problem}");
        let open = parse("bifolio_class=a").unwrap();
        assert_eq!(open.check_joined_with(&parse("").unwrap()), Ok(()));
        assert!(open.check_joined_with(&parse("bifolio_class=b").unwrap()).is_err());
    }

    #[test]
    fn a_database_has_its_class_in_the_cache_that_it_gets() {
        let uri = "bifolio_memory=8MiB&bifolio_class=a&bifolio_floor=1MiB&bifolio_ceiling=2MiB";
        let cache = parse(uri).unwrap().cache().unwrap();
        let stats = cache.class("a").unwrap().stats();
        assert_eq!((stats.floor_bytes, stats.ceiling_bytes), (1 << 20, 2 << 20));
        let uri = "bifolio_memory=8MiB&bifolio_class=a&bifolio_floor=8MiB";
        let problem = parse(uri).unwrap().cache().unwrap_err();
        assert!(problem.contains("floor"), "{problem}");
    }
}
