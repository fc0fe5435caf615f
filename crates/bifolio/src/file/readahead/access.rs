//! The announced order of a handle's reads.

/// The order in which a handle's reads come, given to
/// [`File::set_access`](crate::File::set_access).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Access {
    /// Detects sequential reads and reads ahead of them. The default.
    #[default]
    Normal,
    /// Reads are sequential. Reads ahead from the first read on, with large windows.
    Sequential,
    /// Reads are random. Reads nothing ahead.
    Random,
    /// Reads data only once, in any order. Like [`Access::Normal`], except that reads do not mark
    /// pages as used, so their pages are evicted before others.
    NoReuse,
}
