//! What differs between the lines of `object_store`: results of 0.14 have extensions of their store.
//! Those of cached answers have none.

use std::ops::Range;

use super::object_store;
use object_store::path::Path;
use object_store::{Attributes, GetResult, GetResultPayload, ListResult, ObjectMeta};

pub(crate) fn get_result(
    payload: GetResultPayload,
    meta: ObjectMeta,
    range: Range<u64>,
    attributes: Attributes,
) -> GetResult {
    GetResult { payload, meta, range, attributes, extensions: Default::default() }
}

pub(crate) fn list_result(common_prefixes: Vec<Path>, objects: Vec<ObjectMeta>) -> ListResult {
    ListResult { common_prefixes, objects, extensions: Default::default() }
}
