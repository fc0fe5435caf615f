//! Gathers through the kernel's page cache: a mapping advised that the order is random.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

use super::sums::RowSums;
use super::task::{Gatherer, Task, Way};
use crate::error::{Error, Result};
use crate::harness::direct;
use crate::harness::mapping::{Hint, Mapping};

/// A mapping of the file.
#[derive(Debug)]
pub(crate) struct Mapped {
    path: PathBuf,
    /// `None` only while `forget` runs: mapped pages stay in the page cache.
    mapping: Option<Arc<Mapping>>,
    row_bytes: u64,
    is_announced: bool,
}

impl Mapped {
    pub(crate) fn open(task: &Task) -> Result<Self> {
        Ok(Self {
            path: task.file.clone(),
            mapping: Some(map(&task.file)?),
            row_bytes: task.row_bytes as u64,
            is_announced: task.way == Way::KernelWillNeed,
        })
    }

    fn read(&self, positions: &[u64], is_announced: bool, sums: &mut RowSums) -> Result<()> {
        let Some(mapping) = &self.mapping else {
            return Err(Error::Refused("the file is not mapped".into()));
        };
        if is_announced {
            positions.iter().try_for_each(|start| mapping.will_need(*start, self.row_bytes))?;
        }
        let span = mapping.span();
        for position in positions {
            sums.add(span.bytes(*position, self.row_bytes as usize), *position);
        }
        Ok(())
    }
}

fn map(path: &std::path::Path) -> Result<Arc<Mapping>> {
    let file = File::open(path).map_err(Error::system(format!("open {}", path.display())))?;
    let mapping = Mapping::of_file(&file, false)?;
    mapping.advise(Hint::Random)?;
    Ok(Arc::new(mapping))
}

impl Gatherer for Mapped {
    fn forget(&mut self) -> Result<()> {
        self.mapping = None;
        direct::drop_page_cache(&self.path)?;
        self.mapping = Some(map(&self.path)?);
        Ok(())
    }

    fn warm(&mut self, positions: &[u64], sums: &mut RowSums) -> Result<()> {
        self.read(positions, true, sums)
    }

    fn gather(&mut self, positions: &[u64], sums: &mut RowSums) -> Result<()> {
        self.read(positions, self.is_announced, sums)
    }
}
