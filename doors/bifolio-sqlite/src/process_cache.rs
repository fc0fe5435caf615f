//! The cache of all databases of the process that do not ask for one of their own.
//!
//! Built when the first database is opened, with the bound of `BIFOLIO_MEMORY`, or 64 MiB, or a
//! quarter of what the process may have if that is less. While memory is short it shrinks, to a
//! quarter of the bound or `BIFOLIO_MEMORY_MIN`. It lives as long as the process, so that opening
//! and closing a database starts no threads, and that the pages of a closed one may stay. A child
//! after a fork has another one: the threads of its parent's are not in it.

use crate::fork::{Mutex, PerProcess};
use crate::settings;
use bifolio::Cache;

/// The variable of the environment with the bound.
const MEMORY_VARIABLE: &str = "BIFOLIO_MEMORY";
/// The variable of the environment with the bound while memory is short.
const FLOOR_VARIABLE: &str = "BIFOLIO_MEMORY_MIN";
/// The variable of the environment with the number of closed databases whose pages may stay.
const KEPT_VARIABLE: &str = "BIFOLIO_KEPT_FILES";
/// Default of [`KEPT_VARIABLE`]. Each takes 2 KiB beside its pages and a watch, of which a user has
/// some ten thousands.
const KEPT_FILES: usize = 1000;

static CACHE: PerProcess<Mutex<Option<Cache>>> = PerProcess::new();

/// Returns the cache, if a database of this process uses it or has used it.
pub(crate) fn existing() -> Option<Cache> {
    CACHE.get().lock().clone()
}

/// Returns the cache, which is built if this process has none yet. The error says why it cannot be
/// built.
pub(crate) fn get() -> Result<Cache, String> {
    let mut found = CACHE.get().lock();
    if let Some(found) = &*found {
        return Ok(found.clone());
    }
    let variable = |name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
    let memory_bytes = match variable(MEMORY_VARIABLE) {
        Some(value) => settings::bound(MEMORY_VARIABLE, &value)?,
        None => settings::default_bound(),
    };
    let floor_bytes = match variable(FLOOR_VARIABLE) {
        Some(value) => settings::size(FLOOR_VARIABLE, &value)?,
        None => settings::default_floor(memory_bytes),
    };
    let kept_files = match variable(KEPT_VARIABLE) {
        Some(value) => value
            .parse()
            .map_err(|_| format!("{KEPT_VARIABLE}={value}: is a number of databases"))?,
        None => KEPT_FILES,
    };
    let builder = Cache::builder().memory(memory_bytes).memory_under_pressure(floor_bytes);
    let built = builder.kept_files(kept_files).build();
    let cache = built.map_err(|error| format!("the cache of this process: {error}"))?;
    *found = Some(cache.clone());
    Ok(cache)
}
