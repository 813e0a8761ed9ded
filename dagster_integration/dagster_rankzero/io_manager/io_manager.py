"""`RankZeroIOManager`: stores rank 0's value atomically, so that the next step gets a complete value or an error."""

import hashlib
import re
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field, PrivateAttr

from dagster_rankzero._compat import dimensions_of, partition_paths, set_data_version
from dagster_rankzero.arguments.inputs import wants_reference
from dagster_rankzero.arguments.partitions import by_partition
from dagster_rankzero.fields import KnownFields
from dagster_rankzero.metadata import describe_partitions, describe_result
from rankzero.pipeline import attempt, split

if TYPE_CHECKING:
    from upath import UPath

    from dagster_rankzero.io_manager.manifest import Manifest
    from rankzero import ResultRef


class RankZeroIOManager(KnownFields, dg.ConfigurableIOManager, dg.UPathIOManager):
    """Stores tensors in plain containers by torch.save, JSON values as JSON, anything else as a pickle.

    A version is committed by its manifest, which is written last: a crash never damages the previous
    version. Loading verifies the checksum. Tensors are mapped into memory, which runs no code. Loading a
    pickle runs code, as with Dagster's default IO manager: set ``allow_pickle`` to False unless you trust
    all users who can write to ``base_path``.

    An output that is a `ResultRef` is stored by its file and never loaded: if run directories and
    ``base_path`` share a file system or an object store, no byte passes through the step. An
    input annotated `ResultRef` gets the handle, and so do the functions of `torch_asset` and
    `torch_distributor_op`, whose ranks open it themselves.

    The checksum is the asset's data version, so that dependents are stale only if the
    content has changed. An output of several partitions (a backfill in a single run) is a dict by
    partition key, and each partition is stored separately.

    Example:
        >>> defs = dg.Definitions(resources={"io_manager": RankZeroIOManager(base_path="s3://bucket/assets")})
    """

    base_path: str | None = Field(
        default=None,
        description="Root of the stored values, a path or an fsspec URL such as s3://bucket/assets. "
        "Left out: rankzero/ in the storage directory of the Dagster instance.",
    )
    allow_pickle: bool = Field(
        default=True,
        description="Store and load values that need pickle. Loading them runs code from base_path, so all users "
        "who can write there must be trusted.",
    )

    _base_path: "UPath" = PrivateAttr()

    def setup_for_execution(self, context: dg.InitResourceContext) -> None:
        """Determines the root directory or URL of the stored values."""
        from upath import UPath

        from rankzero.pipeline import store

        root = self.base_path
        if root is None:
            if context.instance is None:
                raise dg.DagsterInvariantViolationError("RankZeroIOManager without an instance needs base_path")
            # Dagster's default IO manager stores an asset in a file where this one needs a directory.
            root = store.join(context.instance.storage_directory(), "rankzero")
        self._base_path = UPath(store.normalize(root))

    def handle_output(self, context: dg.OutputContext, obj: Any) -> None:
        """Stores an output; one of several partitions is a dict by partition key."""
        if not context.has_asset_partitions or len(context.asset_partition_keys) == 1:
            super().handle_output(context, obj)
            return
        keys = [str(key) for key in context.asset_partition_keys]
        values = by_partition(obj, keys, context.asset_key.to_user_string())
        stored = {
            str(key): self._commit(context, values[key], path) for key, path in partition_paths(self, context).items()
        }
        nothing: dict[str, Any] = {}
        described = attempt(context.log, "their description", lambda: describe_partitions(stored), nothing)
        context.add_output_metadata(described)
        versions = "\n".join(f"{key}\t{ref.digest}" for key, ref in sorted(stored.items()))
        set_data_version(context, hashlib.sha256(versions.encode()).hexdigest())

    def dump_to_path(self, context: dg.OutputContext, obj: Any, path: "UPath") -> None:
        """Commits a value, or the file of a `ResultRef`, as the new version."""
        ref = self._commit(context, obj, path)
        context.add_output_metadata(attempt(context.log, "its description", lambda: describe_result(ref), {}))
        set_data_version(context, split(ref.digest)[1])

    def _commit(self, context: dg.OutputContext, value: Any, path: "UPath") -> "ResultRef":
        from dagster_rankzero.io_manager.manifest import commit
        from rankzero import ResultError

        try:
            owner = self._owner_of(context, path)
            return commit(value, str(path), context.run_id, allow_pickle=self.allow_pickle, owner=owner)
        except ResultError as error:
            raise dg.Failure(str(error), allow_retries=False) from error

    def load_from_path(self, context: dg.InputContext, path: "UPath") -> Any:
        """Loads the value; an input that accepts a handle gets that instead.

        Raises:
            FileNotFoundError: no value was stored there.
            dagster.Failure: the file is damaged, or is a pickle although none is allowed. Not retried.
        """
        from dagster_rankzero.io_manager.manifest import check_format, check_owner, read_manifest
        from rankzero import ResultError

        directory = str(path)
        manifest: Manifest | None = None
        try:
            manifest = read_manifest(directory)
            check_owner(directory, manifest, self._owner_of(context, path))
            check_format(manifest.format, self.allow_pickle)
            ref = manifest.reference(directory)
            return ref if wants_reference(context.dagster_type) else ref.load()
        except ResultError as error:
            metadata = describe_result(manifest.reference(directory)) if manifest else {}
            raise dg.Failure(
                str(error), metadata={"path": dg.MetadataValue.path(directory), **metadata}, allow_retries=False
            ) from error

    def make_directory(self, path: "UPath") -> None:
        """Does nothing, since `dump_to_path` creates the directory."""

    def path_exists(self, path: "UPath") -> bool:
        """Returns True if a version was committed at a path."""
        from rankzero.pipeline import store

        return store.exists(str(path / "manifest.json"))

    def get_asset_relative_path(self, context: dg.InputContext | dg.OutputContext) -> "UPath":
        """Returns a path below ``base_path`` that is valid for every asset key."""
        from upath import UPath

        return UPath(*map(segment, context.asset_key.path))

    def make_safe_partition_path(self, base_path: "UPath", partition: str) -> "UPath":
        """Returns a path below the asset's that is valid for every partition key."""
        return base_path.joinpath(segment(partition))

    def _get_paths_for_partitions(self, context: dg.InputContext | dg.OutputContext) -> dict[str, "UPath"]:
        # Dagster's method joins the dimensions first, so that ("a/b", "c") and ("a", "b/c") would share a path.
        asset_path = self._get_path_without_extension(context)
        keys = context.asset_partition_keys
        return {key: asset_path.joinpath(*map(segment, dimensions_of(key))) for key in keys}

    def _owner_of(self, context: dg.InputContext | dg.OutputContext, path: "UPath") -> list[str] | None:
        """Returns the parts of the asset's key, and the path of the partition below it; None for an op's output."""
        if not context.has_asset_key:
            return None
        asset_path = self._get_path_without_extension(context)
        return [*context.asset_key.path, str(path).removeprefix(str(asset_path)).strip("/")]


LIMIT = 255
"""Most bytes of the name of a directory in common file systems."""

_KEPT = 180
# Bytes of a longer name that are kept before its checksum.


def segment(text: str) -> str:
    """Returns the name of one directory for a part of an asset's key or a dimension of a partition's key.

    Most keys are their own names. A slash, a percent sign and a NUL are escaped, so that no two keys share a name.

    Example:
        >>> segment("2026-01-01"), segment("a/b"), segment("a%2Fb"), segment(".."), segment("")
        ('2026-01-01', 'a%2Fb', 'a%252Fb', '%2E%2E', '%')
    """
    name = re.sub(r"[%/\0]", lambda found: f"%{ord(found[0]):02X}", text)
    if name in (".", ".."):
        return name.replace(".", "%2E")
    encoded = name.encode("utf-8", "surrogatepass")
    if len(encoded) > LIMIT:
        return f"{encoded[:_KEPT].decode('utf-8', 'ignore')}%~{hashlib.sha256(encoded).hexdigest()[:32]}"
    return name or "%"
