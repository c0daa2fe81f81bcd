//! The four ways to patch: pure functions from an object and a patch to the patched object.

pub(super) mod apply;
pub(super) mod json;
pub(super) mod merge;
pub(super) mod strategic;

use super::kind::Kind;
use super::status::ApiError;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PatchType {
    Json,
    Merge,
    Strategic,
    Apply,
}

impl PatchType {
    pub(super) fn of(kind: &Kind, content_type: &str) -> Result<Self, ApiError> {
        let essence = content_type.split(';').next().unwrap_or_default().trim();
        let custom = "application/json-patch+json, application/merge-patch+json, application/apply-patch+yaml";
        match essence {
            "application/json-patch+json" => Ok(Self::Json),
            "application/merge-patch+json" => Ok(Self::Merge),
            "application/apply-patch+yaml" => Ok(Self::Apply),
            "application/strategic-merge-patch+json" if !kind.traits.custom => Ok(Self::Strategic),
            _ if kind.traits.custom => Err(ApiError::unsupported_media_type(custom)),
            _ => Err(ApiError::unsupported_media_type(&format!("{custom}, application/strategic-merge-patch+json"))),
        }
    }
}
