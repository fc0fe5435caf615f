//! The pragmas of this VFS: `bifolio_stats` and `bifolio_memory`.

use crate::settings;
use bifolio::Cache;
use std::fmt::Write;

/// Returns the counters of a cache that are not zero.
pub(crate) fn describe(cache: &Cache) -> String {
    let stats = cache.stats();
    let mut text = String::new();
    for (name, value) in stats.levels().into_iter().chain(stats.counts()) {
        if value > 0 {
            let _ = writeln!(text, "{name} {value}");
        }
    }
    for fallback in &stats.fallbacks {
        let _ = writeln!(text, "fallback: {fallback}");
    }
    text.truncate(text.trim_end().len());
    text
}

/// Returns the bound on memory of a cache, after changing it to `wanted`, if that is given.
pub(crate) fn memory(cache: &Cache, wanted: Option<&str>) -> Result<String, String> {
    if let Some(wanted) = wanted {
        let bytes = settings::bound("bifolio_memory", wanted)?;
        cache.set_memory(bytes).map_err(|error| error.to_string())?;
    }
    Ok(cache.stats().memory.bound_bytes.to_string())
}
