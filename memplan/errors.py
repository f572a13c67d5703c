"""All errors that memplan raises; each is a `memplan.MemplanError`."""

from hlo_passes.errors import *  # noqa: F403
from memplan.buckets.errors import BucketsError as BucketsError
from memplan.buckets.errors import PaddingError as PaddingError
from memplan.kv.errors import KvSettingError as KvSettingError
from memplan.kv.errors import NoPagesError as NoPagesError
from memplan.kv.errors import PageError as PageError
from memplan.kv.errors import TraceError as TraceError
from memplan.serve.errors import BusyError as BusyError
from memplan.serve.errors import CheckpointError as CheckpointError
from memplan.serve.errors import ExtraMissingError as ExtraMissingError
from memplan.serve.errors import RequestError as RequestError
from memplan.serve.errors import ServeSettingError as ServeSettingError
from memplan.sidecar.errors import IntentsFormatError as IntentsFormatError
from memplan.sidecar.errors import IntentsOptionError as IntentsOptionError
from memplan.sidecar.errors import PageTableError as PageTableError
