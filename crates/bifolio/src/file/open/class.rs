//! The class of a file (`memory/classes.rs`), as the options of its opens name it.

use super::Registry;
use super::open_file::Open;
use crate::error::{Error, Result};
use crate::file::OpenOptions;
use crate::page::{ClassId, PAGE_BYTES};

/// Part of the ceiling of a class that a readahead window has, as of the bound of a cache.
const WINDOW_DIVISOR: u64 = 8;

impl Registry {
    /// Returns the class that the options name; `None` if they name none.
    pub(super) fn class_of(&self, options: &OpenOptions) -> Result<Option<ClassId>> {
        let Some(name) = &options.class else { return Ok(None) };
        let found = self.reclaim.memory.lru.classes.find(name);
        let unknown =
            || Error::config("class", format!("no class `{name}` was made (Cache::class)"));
        found.ok_or_else(unknown).map(Some)
    }

    /// Fails if a further handle with `options` conflicts with the open ones. Changes nothing.
    pub(super) fn admit(&self, open: &Open, options: &OpenOptions) -> Result<()> {
        let (wanted, class) = (self.class_of(options), open.inode.class);
        let wanted = wanted.map_err(|error| error.in_file(open.inode.name()))?;
        if let Some(wanted) = wanted.filter(|wanted| *wanted != class) {
            let classes = &self.reclaim.memory.lru.classes;
            let (wanted, name) = (classes.name(wanted), classes.name(class));
            let text = format!("in class `{wanted}`: it is open in this cache in class `{name}`");
            return Err(Error::conflict(open.inode.name(), text));
        }
        open.admit(options)
    }

    /// Returns the largest readahead window of a file: in a class with a ceiling an eighth of that,
    /// as of the bound, or it would push out what it has read ahead.
    pub(super) fn window_bytes_max(&self, open: &Open) -> u64 {
        let classes = &self.reclaim.memory.lru.classes;
        let ceiling_pages = classes.limits(open.inode.class).ceiling_pages;
        self.readahead_bytes_max.min(ceiling_pages.saturating_mul(PAGE_BYTES) / WINDOW_DIVISOR)
    }
}
