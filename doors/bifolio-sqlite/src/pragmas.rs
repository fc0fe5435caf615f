//! The pragmas of this VFS: `bifolio_stats`, `bifolio_memory`, `bifolio_save` and `bifolio_warm`.
//!
//! # Safety
//! Reads the argument of `SQLITE_FCNTL_PRAGMA`: space for an answer, the name, and a value or null.
#![allow(unsafe_code)]

use crate::settings;
use crate::sqlite::{self, Api};
use crate::system::Answer;
use bifolio::{Cache, FileStats};
use std::ffi::{CStr, c_char};
use std::fmt::Write;
use std::path::Path;

/// A pragma, which need not be one of this VFS.
pub(crate) struct Asked {
    /// In lower case.
    pub(crate) name: String,
    pub(crate) value: Option<String>,
}

/// Returns the pragma that SQLite passes.
///
/// # Safety
/// The argument of `SQLITE_FCNTL_PRAGMA`.
pub(crate) unsafe fn asked(arguments: *mut *mut c_char) -> Asked {
    let text = |place| {
        // SAFETY: the contract.
        let text = unsafe { arguments.wrapping_add(place).read() };
        // SAFETY: null, or a text that lives as long as the call.
        let text = (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy());
        text.map(|text| text.into_owned())
    };
    Asked { name: text(1).unwrap_or_default().to_ascii_lowercase(), value: text(2) }
}

/// Answers a pragma of this VFS, whose cache of the database is `cache`; `NOTFOUND` for others.
///
/// # Safety
/// The argument of `SQLITE_FCNTL_PRAGMA`.
pub(crate) unsafe fn answer(
    api: Api,
    cache: &Cache,
    asked: &Asked,
    arguments: *mut *mut c_char,
) -> Answer {
    let answered = match asked.name.as_str() {
        "bifolio_stats" => match &asked.value {
            Some(database) => describe_database(cache, database),
            None => Ok(describe(cache)),
        },
        "bifolio_memory" => memory(cache, asked.value.as_deref()),
        "bifolio_save" => save(cache, asked.value.as_deref()),
        "bifolio_warm" => warm(cache, asked.value.as_deref()),
        _ => return Err(sqlite::NOTFOUND),
    };
    let (text, code) = match &answered {
        Ok(text) => (text, Ok(())),
        Err(problem) => (problem, Err(sqlite::ERROR)),
    };
    // SAFETY: the space for an answer, which SQLite frees.
    unsafe { arguments.write(api.text(text)) };
    code
}

/// Returns the counters of a cache that are not zero.
fn describe(cache: &Cache) -> String {
    let stats = cache.stats();
    let mut text = String::new();
    for (name, value) in stats.levels().into_iter().chain(stats.counts()) {
        if value > 0 {
            let _ = writeln!(text, "{name} {value}");
        }
    }
    for class in cache.classes() {
        let _ = writeln!(
            text,
            "class {}: resident_bytes {} misses {} refaults {} evicted_bytes {}",
            class.name, class.resident_bytes, class.misses, class.refaults, class.evicted_bytes
        );
    }
    for fallback in &stats.fallbacks {
        let _ = writeln!(text, "fallback: {fallback}");
    }
    text.truncate(text.trim_end().len());
    text
}

/// Returns what a database has in a cache; `name` is its path, or the end of it. The error names
/// those that are open.
fn describe_database(cache: &Cache, name: &str) -> Result<String, String> {
    let is_it = |file: &FileStats| Path::new(&file.file).ends_with(name);
    let files = cache.files();
    let file = files.iter().find(|file| is_it(file));
    let FileStats { len_bytes, resident_bytes, dirty_bytes, .. } = file.ok_or_else(|| {
        let open: Vec<_> = files.iter().map(|file| file.file.as_str()).collect();
        let open = open.join(", ");
        format!("bifolio_stats={name}: no such file in this cache; there are: {open}")
    })?;
    Ok(format!("len_bytes {len_bytes}\nresident_bytes {resident_bytes}\ndirty_bytes {dirty_bytes}"))
}

/// Writes a list of the pages in memory. Returns the bytes of these pages.
fn save(cache: &Cache, path: Option<&str>) -> Result<String, String> {
    let path = path.ok_or("bifolio_save needs the path of a list: pragma bifolio_save='hot'")?;
    let saved = cache.save_hot(path).map_err(|error| error.to_string())?;
    Ok(saved.page_bytes.to_string())
}

/// Starts to read the pages of a list. Returns the bytes of these pages.
fn warm(cache: &Cache, path: Option<&str>) -> Result<String, String> {
    let path = path.ok_or("bifolio_warm needs the path of a list: pragma bifolio_warm='hot'")?;
    let restore = cache.restore_hot(path).map_err(|error| error.to_string())?;
    Ok(restore.progress().listed_bytes.to_string())
}

/// Returns the bound on memory of a cache, after changing it to `wanted`, if that is given.
fn memory(cache: &Cache, wanted: Option<&str>) -> Result<String, String> {
    if let Some(wanted) = wanted {
        let bytes = settings::bound("bifolio_memory", wanted)?;
        cache.set_memory(bytes).map_err(|error| error.to_string())?;
    }
    Ok(cache.stats().memory.bound_bytes.to_string())
}
