//! Names in texts of the library: those of the C interface instead of Rust's.
//!
//! Called for every error and every line of the log. A test looks for names in the library that
//! are missing here.

use bifolio::{Error, ErrorKind};

/// Calls and types in texts, and their names in C.
const CALLS: [(&str, &str); 16] = [
    ("CacheBuilder::memory_max", "memory_bytes_max of bifolio_cache_options"),
    ("CacheBuilder::memory", "memory_bytes of bifolio_cache_options"),
    ("CacheBuilder::dirty_max", "dirty_bytes_max of bifolio_cache_options"),
    ("CacheBuilder::swap_directory", "swap_directory of bifolio_cache_options"),
    ("CacheBuilder::swap_max", "swap_bytes_max of bifolio_cache_options"),
    ("OpenOptions::len_max", "len_max_bytes of bifolio_open_options"),
    ("Cache::set_memory", "bifolio_cache_set_memory"),
    ("Cache::reserve", "bifolio_cache_reserve"),
    ("Cache::class", "bifolio_class_set"),
    ("File::raise_len_max", "bifolio_file_raise_len_max"),
    ("File::discard_dirty", "bifolio_file_discard_dirty"),
    ("File::set_len", "bifolio_file_set_len"),
    ("PageRefMut", "bifolio_write_pin"),
    ("GatedFile::assign_lsn", "bifolio_file_assign_lsn"),
    ("GatedFile::unlogged", "bifolio_file_unlogged"),
    ("by its GatedFile", "by bifolio_file_write_logged"),
];

/// Settings that an error of a setting begins with, and their names in C.
const SETTINGS: [(&str, &str); 10] = [
    ("memory", "memory_bytes"),
    ("memory_max", "memory_bytes_max"),
    ("memory_under_pressure", "memory_bytes_under_pressure"),
    ("dirty_max", "dirty_bytes_max"),
    ("dirty_background", "dirty_bytes_background"),
    ("dirty_age_max", "dirty_age_ms_max"),
    ("reclaim_wait_max", "reclaim_wait_ms_max"),
    ("readahead_max", "readahead_bytes_max"),
    ("swap_max", "swap_bytes_max"),
    ("len_max", "len_max_bytes"),
];

/// Returns a text of the library with names of the C interface.
pub(crate) fn in_c(text: &str) -> String {
    CALLS.iter().fold(text.to_owned(), |text, (rust, c)| text.replace(rust, c))
}

/// Returns the text of an error with names of the C interface.
pub(crate) fn text_of(error: &Error) -> String {
    let text = error.to_string();
    let file = error.file().map(|file| format!("{file}: ")).unwrap_or_default();
    let Some(message) = text.strip_prefix(&file) else { return in_c(&text) };
    let mut message = in_c(message);
    if error.kind() == ErrorKind::Config {
        let setting = message.split(": ").next().unwrap_or_default();
        if let Some((rust, c)) = SETTINGS.iter().find(|(rust, _)| *rust == setting) {
            message.replace_range(..rust.len(), c);
        }
    }
    file + &message
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::Path;

    /// Returns the string literals of a source file.
    fn literals(source: &str) -> String {
        let (code, _) = source.split_once("#[cfg(test)]\nmod tests {").unwrap_or((source, ""));
        let lines = code.lines().filter(|line| !line.trim_start().starts_with("//"));
        let code = lines.collect::<Vec<_>>().join("\n").replace("'\"'", "").replace("\\\"", "");
        code.split('"').skip(1).step_by(2).collect::<Vec<_>>().join("\n")
    }

    fn visit(folder: &Path, check: &mut impl FnMut(&str)) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() && !path.ends_with("tests") {
                visit(&path, check);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                check(&literals(&fs::read_to_string(&path).unwrap()));
            }
        }
    }

    #[test]
    fn every_rust_name_in_a_text_of_the_library_has_one_in_c() {
        const TYPES: [&str; 7] = [
            "GatedFile",
            "CacheBuilder::",
            "OpenOptions::",
            "Cache::",
            "File::",
            "PageRef",
            "MapMut",
        ];
        let library = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../crates/bifolio/src");
        let mut found = 0;
        visit(&library, &mut |literals| {
            found += usize::from(in_c(literals) != literals);
            for line in in_c(literals).lines() {
                assert!(!TYPES.iter().any(|name| line.contains(name)), "{line}");
            }
        });
        assert!(found > 5, "{found}");
    }

    #[test]
    fn settings_have_their_names_in_c() {
        let refused = bifolio::Cache::builder().memory(1).build().unwrap_err();
        assert!(text_of(&refused).starts_with("memory_bytes: 1 bytes"), "{}", text_of(&refused));
        let cache = bifolio::Cache::builder().memory(1 << 20).build().unwrap();
        let options = bifolio::OpenOptions::new().len_max(u64::MAX);
        let refused = cache.memory_file_with("memory: x", &options).unwrap_err();
        assert!(text_of(&refused).starts_with("memory: x: len_max_bytes: "), "{refused}");
    }
}
