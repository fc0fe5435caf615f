//! Kept bytes: which bytes of objects have slots and a class of the page cache of their own.
//!
//! The slots of a tier are divided into regions: one for each class, in the order of the builder, then
//! one for all other parts. A part with kept bytes takes the slot of another such part only. The page
//! cache has a file for each region, in its class, over the same file on disk: the kept blocks of a
//! part are read through that of their region, its other blocks through the last one. A region is a
//! range of slots, so a tier that is opened with other classes has the same parts.
//!
//! In which file a block of a slot is stays as it was when the part was put there, whatever the
//! program's choice returns later: the slot knows its kept blocks.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use object_store::path::Path;

use super::object_store;
use super::record::Layout;

/// Returns which bytes of an object of this name and length are kept.
type Choose = dyn Fn(&Path, u64) -> Range<u64> + Send + Sync;

/// A class of kept bytes.
#[derive(Clone)]
pub(crate) struct Keep {
    pub(crate) class: String,
    /// Bytes of the tier for the slots of its parts.
    pub(crate) bytes: u64,
    pub(crate) choose: Arc<Choose>,
}

impl fmt::Debug for Keep {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { class, bytes, .. } = self;
        let mut keep = formatter.debug_struct("Keep");
        keep.field("class", class).field("bytes", bytes).finish_non_exhaustive()
    }
}

/// What is kept of an object: a range of its bytes for each class.
#[derive(Debug)]
pub(crate) struct Kept(Vec<Range<u64>>);

/// The region that a part belongs to, and those of its blocks that are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Home {
    pub(crate) region: usize,
    pub(crate) kept_blocks: Range<u32>,
}

impl Kept {
    /// Calls the program's choice.
    pub(crate) fn of(keeps: &[Keep], location: &Path, object_bytes: u64) -> Self {
        let ranges = keeps.iter().map(|keep| {
            let Range { start, end } = (keep.choose)(location, object_bytes);
            start..end.min(object_bytes)
        });
        Self(ranges.collect())
    }

    /// Returns the home of a part: the region of the first class that has bytes of it.
    pub(crate) fn home(&self, number: u32, layout: &Layout) -> Home {
        let start = u64::from(number) * layout.part_bytes;
        let end = start + layout.part_bytes;
        for (region, kept) in self.0.iter().enumerate() {
            let within = kept.start.max(start)..kept.end.min(end);
            if !within.is_empty() {
                let first_block = (within.start - start) / layout.block_bytes;
                let end_block = (within.end - start).div_ceil(layout.block_bytes);
                return Home { region, kept_blocks: first_block as u32..end_block as u32 };
            }
        }
        Home { region: self.0.len(), kept_blocks: 0..0 }
    }
}

/// A range of slots, and the class of the page cache that they are in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Region {
    pub(crate) slots: Range<u32>,
    pub(crate) class: Option<String>,
}

/// Returns the regions of a tier of `slots` slots, each of which takes `slot_bytes` of it.
///
/// # Errors
/// What is wrong with the lengths of the classes.
pub(crate) fn regions(keeps: &[Keep], slots: u32, slot_bytes: u64) -> Result<Vec<Region>, String> {
    let (mut regions, mut start) = (Vec::with_capacity(keeps.len() + 1), 0);
    for Keep { class, bytes, .. } in keeps {
        let length = bytes / slot_bytes;
        if length == 0 {
            return Err(format!("{bytes} bytes for {class:?} have no room for a part"));
        }
        let left = slots - start;
        let Some(length) = u32::try_from(length).ok().filter(|length| *length < left) else {
            let left_bytes = u64::from(left) * slot_bytes;
            return Err(format!(
                "{bytes} bytes for {class:?} leave no room for other parts in {left_bytes} bytes"
            ));
        };
        regions.push(Region { slots: start..start + length, class: Some(class.clone()) });
        start += length;
    }
    regions.push(Region { slots: start..slots, class: None });
    Ok(regions)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keep(class: &str, bytes: u64) -> Keep {
        Keep { class: class.into(), bytes, choose: Arc::new(|_, bytes| bytes - 10..u64::MAX) }
    }

    #[test]
    fn regions_cover_all_slots_and_leave_some_for_other_parts() {
        let of = |keeps: &[Keep], slots| {
            let regions = regions(keeps, slots, 100)?;
            Ok::<_, String>(regions.into_iter().map(|it| it.slots).collect::<Vec<_>>())
        };
        let alike = of(&[], 7).unwrap();
        assert_eq!((alike.len(), &alike[0]), (1, &(0..7)));
        assert_eq!(of(&[keep("a", 299), keep("b", 300)], 7), Ok(vec![0..2, 2..5, 5..7]));
        let short = of(&[keep("a", 99)], 7).unwrap_err();
        assert_eq!(short, "99 bytes for \"a\" have no room for a part");
        for bytes in [200, u64::MAX] {
            let long = of(&[keep("a", 500), keep("b", bytes)], 7).unwrap_err();
            let expected =
                format!("{bytes} bytes for \"b\" leave no room for other parts in 200 bytes");
            assert_eq!(long, expected);
        }
    }

    #[test]
    fn the_blocks_with_kept_bytes_have_the_region_of_the_first_class_that_has_some() {
        let layout = Layout { part_bytes: 400, block_bytes: 100, slots: 9 };
        let head = Keep { choose: Arc::new(|_, _| 0..101), ..keep("head", 1) };
        let none = Keep { choose: Arc::new(|_, bytes| bytes..5), ..keep("none", 1) };
        let kept = Kept::of(&[none, head, keep("end", 1)], &Path::from("a"), 805);
        let home = |number| {
            let Home { region, kept_blocks } = kept.home(number, &layout);
            (region, kept_blocks)
        };
        // The last ten bytes are in two parts.
        let expected = [(1, 0..2), (2, 3..4), (2, 0..1), (3, 0..0), (3, 0..0)];
        assert_eq!([0, 1, 2, 3, u32::MAX].map(home), expected);
    }
}
