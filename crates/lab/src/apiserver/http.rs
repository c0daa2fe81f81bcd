//! HTTP in and out: a request becomes a verb on a route, its outcome becomes a response.
//!
//! [`answer`] is the whole API as a function; the HTTP handler and the in-process calls of the lab both go through it.

use std::convert::Infallible;
use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::extract::rejection::BytesRejection;
use axum::extract::{Query as Pairs, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header};
use axum::response::Response;
use futures::stream;
use serde_json::{Value, json};

use super::access::{self, Attempt, Caller};
use super::patch::PatchType;
use super::query::Query;
use super::represent::Representation;
use super::route::{ApiRoute, RouteTarget};
use super::select::ListSelector;
use super::status::{ApiError, StatusCause};
use super::store::{ObjectKey, Store};
use super::verbs::delete::{self, DeleteOptions, Deletion};
use super::verbs::{Subresource, Write, WriteOptions, WriteResult, create, patch, update};
use super::watch::{Scope, Watch};
use super::{discovery, list, openapi};

pub(super) struct ApiRequest<'a> {
    pub method: &'a Method,
    pub path: &'a str,
    pub query: &'a [(String, String)],
    pub accept: &'a str,
    pub content_type: &'a str,
    pub user_agent: &'a str,
    /// The header with the credentials; empty for the administrator.
    pub authorization: &'a str,
    pub body: &'a [u8],
}

pub(super) enum ApiResponse {
    Text { code: u16, text: &'static str },
    Json { code: u16, body: Value, warnings: Vec<String> },
    Watch(Box<Watch>),
}

impl From<Value> for ApiResponse {
    fn from(body: Value) -> Self {
        Self::Json { code: 200, body, warnings: Vec::new() }
    }
}

/// The handler of every path.
pub(super) async fn serve(
    State(store): State<Arc<Store>>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Response {
    let header = |name| headers.get(name).and_then(|value: &HeaderValue| value.to_str().ok()).unwrap_or_default();
    let pairs = Pairs::<Vec<(String, String)>>::try_from_uri(&uri);
    let outcome = match (&pairs, &body) {
        (Ok(Pairs(pairs)), Ok(body)) => answer(
            &store,
            &ApiRequest {
                method: &method,
                path: uri.path(),
                query: pairs,
                accept: header(header::ACCEPT),
                content_type: header(header::CONTENT_TYPE),
                user_agent: header(header::USER_AGENT),
                authorization: header(header::AUTHORIZATION),
                body,
            },
        ),
        (Err(error), _) => Err(ApiError::bad_request(error.to_string())),
        (_, Err(error)) if error.status() == StatusCode::PAYLOAD_TOO_LARGE => Err(ApiError::body_too_large()),
        (_, Err(error)) => Err(ApiError::bad_request(error.to_string())),
    };
    let code = match &outcome {
        Ok(ApiResponse::Json { code, .. } | ApiResponse::Text { code, .. }) => *code,
        Ok(ApiResponse::Watch(_)) => 200,
        Err(refusal) => refusal.code(),
    };
    tracing::debug!(%method, %uri, code, "request");
    respond(outcome)
}

fn respond(outcome: Result<ApiResponse, ApiError>) -> Response {
    match outcome {
        Ok(ApiResponse::Text { code, text }) => {
            let mut response = with_code(code, Body::from(text));
            response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("text/plain"));
            response
        }
        Ok(ApiResponse::Json { code, body, warnings }) => {
            let mut response = json_response(code, &body);
            for warning in warnings {
                let text = format!("299 - {}", json!(warning));
                if let Ok(value) = HeaderValue::from_str(&text) {
                    response.headers_mut().append(header::WARNING, value);
                }
            }
            response
        }
        Ok(ApiResponse::Watch(watch)) => {
            let lines = stream::unfold(watch, |mut watch| async move {
                let line = watch.next().await?;
                Some((Ok::<_, Infallible>(line), watch))
            });
            let mut response = Response::new(Body::from_stream(lines));
            response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
            response
        }
        Err(refusal) => json_response(refusal.code(), &refusal.to_status()),
    }
}

fn json_response(code: u16, body: &Value) -> Response {
    let mut response = with_code(code, Body::from(body.to_string()));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

fn with_code(code: u16, body: Body) -> Response {
    let mut response = Response::new(body);
    *response.status_mut() = StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    response
}

/// kubectl asks for OpenAPI v2, in protobuf alone, as a last resort for a kind that is in no document of v3. Of this answer it shows
/// the text, if it is text.
const UNKNOWN_KIND: &str = "this test server does not serve the kind, and runs no workloads: it is for the objects that `kubectl \
                            api-resources` lists, beside agents that run already (docs/lab.md)";

pub(super) fn answer(store: &Arc<Store>, request: &ApiRequest<'_>) -> Result<ApiResponse, ApiError> {
    let caller = Caller::of(request.authorization)?;
    let state = store.lock();
    let registry = &state.registry;
    let document = match ApiRoute::parse(registry, request.path)? {
        ApiRoute::Resource(target) => {
            caller.check(&state, &attempt(request, &target))?;
            drop(state);
            return resource(store, request, &target);
        }
        _ if request.method != Method::GET => return Err(ApiError::method_not_allowed()),
        ApiRoute::Healthy => return Ok(ApiResponse::Text { code: 200, text: "ok" }),
        ApiRoute::Version => discovery::version(),
        ApiRoute::CoreVersions => discovery::core_versions(),
        ApiRoute::Groups => discovery::groups(registry),
        ApiRoute::Group(name) => discovery::group(registry, &name)?,
        ApiRoute::Resources { group, version } => discovery::resources(registry, &group, &version)?,
        ApiRoute::OpenApiV2 if !accepts_json(request.accept) => {
            return Ok(ApiResponse::Text { code: 406, text: UNKNOWN_KIND });
        }
        ApiRoute::OpenApiV2 => openapi::v2(),
        ApiRoute::OpenApiV3Index => openapi::v3_index(registry),
        ApiRoute::OpenApiV3 { group, version } => openapi::v3(registry, &group, &version)?,
    };
    Ok(document.into())
}

fn accepts_json(accept: &str) -> bool {
    accept.is_empty() || Representation::negotiate(accept, "").is_ok()
}

/// A request as RBAC names it.
fn attempt<'a>(request: &'a ApiRequest<'_>, target: &'a RouteTarget) -> Attempt<'a> {
    let watches = request.query.iter().any(|(key, value)| key == "watch" && matches!(value.as_str(), "true" | "1"));
    let verb = match (request.method, &target.name) {
        (&Method::GET, _) if watches => "watch",
        (&Method::GET, None) => "list",
        (&Method::POST, _) => "create",
        (&Method::PUT, _) => "update",
        (&Method::PATCH, _) => "patch",
        (&Method::DELETE, _) => "delete",
        _ => "get",
    };
    let (plural, subresource) = (&target.kind.plural, target.subresource.as_str());
    let resource = if subresource.is_empty() { plural.clone() } else { format!("{plural}/{subresource}") };
    let name = target.name.as_deref().or_else(|| only_name(request));
    Attempt { verb, kind: &target.kind, resource, namespace: target.namespace.as_deref(), name }
}

/// A list or a watch that asks for one object by its name is a request for that object.
fn only_name<'a>(request: &'a ApiRequest<'_>) -> Option<&'a str> {
    let (_, selector) = request.query.iter().find(|(key, _)| key == "fieldSelector")?;
    selector.strip_prefix("metadata.name=").filter(|name| !name.contains(','))
}

fn resource(store: &Arc<Store>, request: &ApiRequest<'_>, target: &RouteTarget) -> Result<ApiResponse, ApiError> {
    let query = Query::parse(request.query)?;
    let shape = Representation::negotiate(request.accept, &query.include_object)?;
    match (request.method, &target.name) {
        (method, Some(name)) if target.subresource == Subresource::Token => {
            store.lock().find(&target.kind, &key(target, name))?;
            let token = access::token(target.namespace.as_deref().unwrap_or_default(), name);
            (method == Method::POST).then(|| token.into()).ok_or_else(ApiError::method_not_allowed)
        }
        (&Method::GET, name) if query.watch => watch(store, target, &query, shape, name.clone()),
        (&Method::GET, None) => {
            let selector = ListSelector::parse(&target.kind, &query.label_selector, &query.field_selector)?;
            let listing = list::list(&store.lock(), &target.kind, target.namespace.as_deref(), &query, &selector)?;
            Ok(shape.list(&target.kind, &listing.items, listing.metadata).into())
        }
        (&Method::GET, Some(name)) => {
            let object = store.lock().find(&target.kind, &key(target, name))?;
            Ok(shape.object(&target.kind, &object).into())
        }
        (&Method::DELETE, Some(name)) => delete(store, request, target, shape, name),
        (&Method::POST, None) | (&Method::PUT | &Method::PATCH, Some(_)) => {
            write(store, request, target, &query, shape)
        }
        _ => Err(ApiError::method_not_allowed()),
    }
}

fn key(target: &RouteTarget, name: &str) -> ObjectKey {
    ObjectKey { namespace: target.namespace.clone().unwrap_or_default(), name: name.to_owned() }
}

fn watch(
    store: &Arc<Store>,
    target: &RouteTarget,
    query: &Query,
    shape: Representation,
    name: Option<String>,
) -> Result<ApiResponse, ApiError> {
    let selector = ListSelector::parse(&target.kind, &query.label_selector, &query.field_selector)?;
    let scope = Scope { kind: target.kind.clone(), namespace: target.namespace.clone(), name, selector, shape };
    Ok(ApiResponse::Watch(Box::new(Watch::start(store, scope, query))))
}

fn delete(
    store: &Arc<Store>,
    request: &ApiRequest<'_>,
    target: &RouteTarget,
    shape: Representation,
    name: &str,
) -> Result<ApiResponse, ApiError> {
    let options = DeleteOptions::parse(request.body)?;
    match store.write(|state| delete::delete(state, &target.kind, &key(target, name), &options))? {
        Deletion::Object(object) => Ok(shape.object(&target.kind, &object).into()),
        Deletion::Done(status) => Ok(status.into()),
    }
}

fn write(
    store: &Arc<Store>,
    request: &ApiRequest<'_>,
    target: &RouteTarget,
    query: &Query,
    shape: Representation,
) -> Result<ApiResponse, ApiError> {
    let options = WriteOptions {
        dry_run: query.dry_run,
        validation: query.field_validation,
        manager: manager(request, query)?,
        force: query.force,
    };
    let how = match request.method {
        &Method::PATCH => Some(PatchType::of(request.content_type)?),
        _ => None,
    };
    if query.force && how != Some(PatchType::Apply) {
        return Err(ApiError::invalid_options(
            "PatchOptions",
            StatusCause::forbidden("force", "may not be specified for non-apply patch"),
        ));
    }
    let body = if how.is_none() { body(request)? } else { Value::Null };
    let (written, warnings) = store.write(|state| -> Result<(WriteResult, Vec<String>), ApiError> {
        let mut write = Write {
            state,
            kind: &target.kind,
            subresource: target.subresource,
            options: &options,
            warnings: Vec::new(),
        };
        let written = match (&target.name, how) {
            (None, _) => create::create(&mut write, target.namespace.as_deref().unwrap_or_default(), &body),
            (Some(name), None) => update::replace(&mut write, &key(target, name), &body),
            (Some(name), Some(how)) => patch::patch(&mut write, &key(target, name), how, request.body),
        }?;
        Ok((written, write.warnings))
    })?;
    let code = if written.is_new { 201 } else { 200 };
    Ok(ApiResponse::Json { code, body: shape.object(&target.kind, &written.object), warnings })
}

/// The field manager: as given, else the first part of the user agent. An apply must give it.
fn manager(request: &ApiRequest<'_>, query: &Query) -> Result<String, ApiError> {
    if !query.field_manager.is_empty() {
        return Ok(query.field_manager.clone());
    }
    if request.content_type.starts_with("application/apply-patch") {
        return Err(ApiError::invalid_options(
            "PatchOptions",
            StatusCause::required("fieldManager", "is required for apply patch"),
        ));
    }
    Ok(match request.user_agent.split('/').next().unwrap_or_default() {
        "" => "unknown".to_owned(),
        agent => agent.to_owned(),
    })
}

fn body(request: &ApiRequest<'_>) -> Result<Value, ApiError> {
    let essence = request.content_type.split(';').next().unwrap_or_default().trim();
    match essence {
        "" | "application/json" => serde_json::from_slice(request.body)
            .map_err(|error| ApiError::bad_request(format!("error decoding JSON: {error}"))),
        "application/yaml" => serde_yaml::from_slice(request.body)
            .map_err(|error| ApiError::bad_request(format!("error decoding YAML: {error}"))),
        "application/vnd.kubernetes.protobuf" => Err(ApiError::no_protobuf()),
        _ => Err(ApiError::unsupported_media_type("application/json, application/yaml")),
    }
}
