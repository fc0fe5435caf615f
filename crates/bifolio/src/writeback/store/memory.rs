//! The store of a memory file: no backing.

/// See the head of the file.
#[derive(Debug)]
pub(crate) struct MemoryStore {
    name: String,
}

impl MemoryStore {
    /// Of a file that messages call `name`.
    pub(crate) fn new(name: String) -> Self {
        Self { name }
    }

    pub(in crate::writeback) fn name(&self) -> &str {
        &self.name
    }
}
